//go:build !linux

package cli

import (
	"context"
	"errors"
	"math/rand/v2"
)

var errNoSmallDisk = errors.New("it needs a tmpfs, which only Linux has")

// fullDisk is a small disk under the data directory.
type fullDisk struct{}

func fillDiskImpossible() error { return errNoSmallDisk }

func (t *torment) fillDisk(context.Context, *rand.Rand) error { return errNoSmallDisk }

func (d *fullDisk) release(*torment) {}
