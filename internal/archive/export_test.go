package archive

import "os"

// FailAfter makes the files that d creates take only n more bytes, then fail as
// a full disk does.
func (d *Dir) FailAfter(n int, err error) {
	d.create = func(dir, pattern string) (file, error) {
		f, e := os.CreateTemp(dir, pattern)
		return &fullFile{File: f, left: n, err: err}, e
	}
}

type fullFile struct {
	*os.File
	left int
	err  error
}

func (f *fullFile) Write(b []byte) (int, error) {
	if f.left -= len(b); f.left < 0 {
		return 0, f.err
	}
	return f.File.Write(b)
}
