package server

import (
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Requests may use any name that the workers of a model accept. An operation first replaces the name with the model's
// own name, so no other part of the node and no other node deals with aliases.

// named replaces the name of a model, in a request without a relevant adapter.
func (s *Server) named(model *string) error {
	t, err := s.registry.Resolve(*model)
	*model = t.Model
	return err
}

// asNamed returns a query with the model that its name stands for, and with the adapter if it is an adapter's name.
func (s *Server) asNamed(q *api.Query) (*api.Query, error) {
	t, err := s.registry.Resolve(q.Model)
	if err != nil || t.Model == q.Model {
		return q, err
	}
	named := *q
	named.Model = t.Model
	named.LoRA, err = adapter(t, q.LoRA, q.Hashes != nil || q.Hashed != nil || q.EngineHashes != nil)
	return &named, err
}

// promptNamed replaces the name of a prompt's model in the same way.
func (s *Server) promptNamed(p *api.Prompt) error {
	t, err := s.registry.Resolve(p.Model)
	if err != nil || t.Model == p.Model {
		return err
	}
	p.Model = t.Model
	p.LoRA, err = adapter(t, p.LoRA, p.Hashes != nil || p.EngineHashes != nil)
	return err
}

// adapter returns the adapter of a prompt. Hashes contain the adapter already.
func adapter(t registry.Target, lora string, hashed bool) (string, error) {
	switch {
	case t.LoRA == "" || hashed:
		return lora, nil
	case lora != "" && lora != t.LoRA:
		return "", api.Errorf(api.CodeMalformed, "the request names the adapter %q as model and the adapter %q as "+
			"lora_name; give one of them", t.LoRA, lora)
	}
	return t.LoRA, nil
}
