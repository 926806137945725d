package tokenize

import (
	"cmp"
	"context"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/usage"
)

// ServerCheck compares the tokenizer of a model with a server. The zero values of As, Render, Texts and Token are
// valid.
type ServerCheck struct {
	File   string // with the tokenizers by model
	Model  string // in the file
	As     string // the model on the server; empty: Model
	Render bool   // the server renders requests
	Texts  string // file with more texts

	Against string // URL of the server
	Token   string // for the server
}

// checkTime is the time limit of a text.
const checkTime = 10 * time.Second

// Run compares all texts. Invalid settings and unreadable files are usage errors.
func (c *ServerCheck) Run(ctx context.Context) ([]Comparison, error) {
	if c.File == "" || c.Model == "" || c.Against == "" {
		return nil, usage.Errorf("give --tokenizers, --model and --against")
	}
	settings, err := ReadSettings(c.File)
	if err != nil {
		return nil, usage.Errorf("--tokenizers: %w", err)
	}
	here := New(Config{Settings: settings, Endpoints: func(string) []string { return nil }}).Source(c.Model)
	if here == nil {
		return nil, usage.Errorf("--tokenizers: %s names nothing for model %q", c.File, c.Model)
	}
	kind := Tokenize
	if c.Render {
		kind = Render
	}
	there, err := Against(kind, c.Against, cmp.Or(c.As, c.Model), c.Token)
	if err != nil {
		return nil, usage.Errorf("--against: %w", err)
	}
	list, err := TextsToCompare(c.Texts)
	if err != nil {
		return nil, usage.Errorf("--texts: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(len(list))*checkTime)
	defer cancel()
	return Compare(ctx, here, there, list)
}
