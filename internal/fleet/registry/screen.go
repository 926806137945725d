package registry

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// Screen decides which registered shared stores a node uses.
type Screen struct {
	// Rule checks the addresses of masters; nil permits all. A name is checked at the connect call.
	Rule *dial.Rule

	// Folders are the permitted folders of stores, as [filepath.Clean] returns them. A lookup in any other folder would
	// reveal its content.
	Folders []string
}

// errFolder is the same for an existing and a missing folder.
var errFolder = errors.New("the folder of the store is not one of --l3-folder")

// Store returns the reason why a node does not use the store of a registration, or nil.
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

// screen returns the unused parts of a record with the reasons, or nil.
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
