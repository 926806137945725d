package registry

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// Screen decides which shared stores of registrations a node uses.
type Screen struct {
	// Rule judges the addresses of masters; nil permits all. A name is judged when it is dialled.
	Rule *dial.Rule

	// Folders are the folders that a store may have, as [filepath.Clean] returns them. To look into any other would say
	// what is there.
	Folders []string
}

// errFolder says the same of a folder that is there and of one that is not.
var errFolder = errors.New("the folder of the store is not one of --l3-folder")

// Store says why a node does not use a store that a worker registers; nil if it does.
func (s *Screen) Store(c *hicache.Config) error {
	if c == nil {
		return nil
	}
	if folder := c.Folder(); folder != "" {
		if !slices.Contains(s.Folders, filepath.Clean(folder)) {
			return errFolder
		}
		return nil
	}
	if err := c.CheckMaster(); err != nil {
		return err
	}
	for _, host := range c.MasterHosts() {
		if err := s.Rule.CheckHost(host); err != nil {
			return fmt.Errorf("master_server_address %w", err)
		}
	}
	return nil
}

// screen says what of a record a node does not use, and why; nil if it uses all.
func (s *Screen) screen(r *Record) error {
	var wrong error
	if err := s.Store(r.L3); err != nil {
		wrong = fmt.Errorf("its shared store is not used: %w", err)
	}
	if r.Worker != nil && r.Worker.Endpoint != "" {
		if err := dial.CheckServing(r.Worker.Endpoint); err != nil {
			wrong = errors.Join(wrong, fmt.Errorf("its serving address is not used: %w", err))
		}
	}
	return wrong
}
