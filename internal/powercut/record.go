package powercut

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// traced are the calls that change a file, all of them: one that this package
// does not model and that touches the directory is an error. A question mark
// lets strace pass over what this processor does not have.
var traced = []string{"openat", "?open", "?creat", "?openat2", "lseek", "write", "pwrite64", "writev", "pwritev", "pwritev2",
	"ftruncate", "truncate", "fallocate", "copy_file_range", "sendfile", "splice", "mmap",
	"fsync", "fdatasync", "sync_file_range", "?rename", "?renameat", "renameat2", "?unlink", "unlinkat",
	"?mkdir", "mkdirat", "?rmdir", "?link", "linkat", "?symlink", "symlinkat"}

func strace(to string, args ...string) *exec.Cmd {
	return exec.Command("strace", append([]string{"-f", "--seccomp-bpf", "-y", "-xx", "-s", "16777216", "-o", to,
		"-e", "signal=none", "-e", "trace=" + strings.Join(traced, ",")}, args...)...)
}

// Available returns why nothing can be recorded here: strace is missing, or
// must not trace. nil if it can.
func Available() error {
	out, err := strace(os.DevNull, "true").CombinedOutput()
	if err != nil {
		return fmt.Errorf("strace does not work here: %w: %s", err, out)
	}
	return nil
}

// Record runs a command until it ends, however it ends, and writes what it and
// its children did to the file trace, for Load. The command's output goes to
// output through a pipe, and is recorded too.
func Record(trace string, output io.Writer, env []string, command ...string) error {
	cmd := strace(trace, command...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = output
	cmd.Stdout = io.MultiWriter(output) // through a pipe, whatever output is
	return cmd.Run()
}
