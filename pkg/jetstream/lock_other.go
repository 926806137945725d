//go:build !unix

package jetstream

import (
	"errors"
	"os"
)

func tryLock(*os.File) (bool, error) {
	return false, errors.New("locking a data folder is not supported on this system")
}
