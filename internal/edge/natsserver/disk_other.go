//go:build !unix

package natsserver

import (
	"errors"
	"os"
)

var errNotHere = errors.New("an embedded server is not supported on this system")

func tryLock(*os.File) (bool, error) { return false, errNotHere }

func unlock(*os.File) error { return errNotHere }

func freeBytes(string) (int64, error) { return 0, errNotHere }
