// Package powercut tells what a power cut would leave of a program's files.
//
// Record runs the program under strace and keeps every call that changes a
// directory, in order, with every fsync. A Disk replays the recording up to any
// moment and then cuts the power: what was synced stays, and of the rest some
// is lost.
//
// # Model
//
//   - A write, a truncation, or a change of a directory (create, rename, remove)
//     is safe when an fsync of that file or directory has returned which began
//     after the change had returned. Syncing a file does not make its name safe.
//   - Everything else may be there, or not, or in part: any subset of the calls
//     on each file, in sectors of 512 or 4096 bytes; see Loss. A call that had
//     begun and not returned is like one that was not synced.
//   - A write that is lost leaves what was there before, or zeros.
//
// The program must name its files in full, or by directory descriptors as Go
// does, and not append (O_APPEND).
//
// Memory that is mapped is not seen. Recording.Mapped names the files that were
// mapped for writing, so that a test can see that there is only SQLite's -shm,
// which holds nothing that counts.
//
// Start reading at Record, then Disk.Cut. The package is for tests.
package powercut
