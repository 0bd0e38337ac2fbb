package cli

import "errors"

var errNoFreeze = errors.New("this system cannot stop a process and let it go on")

func freezeImpossible() error { return errNoFreeze }

func (p *process) freeze() error { return errNoFreeze }

func (p *process) thaw() error { return errNoFreeze }
