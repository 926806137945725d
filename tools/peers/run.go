package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/kvatlas/kvatlas/tools/corpus"
)

// us is the name of this index in the table.
const us = "kvatlas"

// exitUnsupported is the harness's exit status for an unsupported mode, a gap in the table.
const exitUnsupported = 3

// index is a compared index with its command.
type index struct {
	name    string
	command func(corpus string, m mode) []string
}

// build builds all programs, the indexer first.
func build(ctx context.Context, f flags) (indexes []index, err error) {
	out, err := output(ctx, "go", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return nil, err
	}
	root := strings.TrimSpace(string(out))
	switch f.ours {
	case "none":
	case "":
		program := filepath.Join(f.cache, "indexer")
		fmt.Fprintln(os.Stderr, "building the indexer …")
		if _, err := output(ctx, "go", "build", "-C", root, "-trimpath", "-o", program, "./cmd/indexer"); err != nil {
			return nil, err
		}
		indexes = append(indexes, index{us, func(corpus string, m mode) []string {
			return append([]string{program, "bench", "index", "--json", "--corpus", corpus, "--mode", m.name},
				m.args()...)
		}})
	default:
		indexes = append(indexes, index{us, template(f.ours)})
	}
	if len(f.peers) == 0 {
		return indexes, nil
	}
	target := filepath.Join(f.cache, "target")
	fmt.Fprintln(os.Stderr, "building the peers (a minute or two at first) …")
	if _, err := output(ctx, "cargo", "build", "--quiet", "--release", "--locked", "--target-dir", target,
		"--manifest-path", filepath.Join(root, "tools", "peers", "harness", "Cargo.toml")); err != nil {
		return nil, err
	}
	for _, name := range f.peers {
		peer, allocator, _ := strings.Cut(name, "+")
		program := filepath.Join(target, "release", strings.TrimSuffix("peers-"+allocator, "-"))
		indexes = append(indexes, index{name, func(corpus string, m mode) []string {
			return append([]string{program, "--index", peer, "--corpus", corpus, "--mode", m.name}, m.args()...)
		}})
	}
	return indexes, nil
}

// template returns a function that fills in a command line.
func template(text string) func(corpus string, m mode) []string {
	return func(corpus string, m mode) (words []string) {
		for _, word := range strings.Fields(text) {
			if word == "{threads}" {
				words = append(words, m.args()...)
			} else {
				words = append(words, strings.NewReplacer("{corpus}", corpus, "{mode}", m.name).Replace(word))
			}
		}
		return words
	}
}

// prepare makes the corpus, unless a valid corpus with the right counts exists.
func prepare(ctx context.Context, f flags, named corpus.Named, progress io.Writer) (path string, h corpus.Header,
	err error) {
	from := fmt.Sprintf("seed-%d", f.seed)
	if f.trace != "" {
		if from, err = fingerprint(f.trace); err != nil {
			return "", h, err
		}
	}
	path = filepath.Join(f.cache, "corpora", from, named.Name+".bin")
	if r, err := corpus.Open(path); err == nil {
		return path, r.Header(), r.Close()
	} else if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, corpus.ErrFormat) {
		return "", h, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", h, err
	}
	h, err = corpus.Run(ctx, corpus.Job{Options: named.Options, Trace: f.trace, Seed: f.seed, Out: path}, progress)
	return path, h, err
}

// fingerprint is a name for a file's content.
func fingerprint(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, file); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return fmt.Sprintf("trace-%x", sum.Sum(nil)[:8]), nil
}

// measure runs every index in every mode, in sequence, in every round. It copies the outputs to raw.
func measure(ctx context.Context, indexes []index, path string, modes []mode, rounds int, raw,
	progress io.Writer) (*results, error) {
	all := &results{modes: modes, values: map[cell][]float64{}, digests: map[string][]string{}}
	for _, x := range indexes {
		all.indexes = append(all.indexes, x.name)
	}
	for _, m := range modes {
		for round := range rounds {
			for _, x := range indexes {
				fmt.Fprintf(progress, "\r\033[K%s %v, round %d: %s", filepath.Base(path), m, round+1, x.name)
				line, err := output(ctx, x.command(path, m)...)
				var exit *exec.ExitError
				if errors.As(err, &exit) && exit.ExitCode() == exitUnsupported {
					continue
				}
				if err == nil {
					err = all.add(x.name, m, line)
				}
				if err == nil {
					_, err = raw.Write(line)
				}
				if err != nil {
					fmt.Fprintln(progress)
					return nil, fmt.Errorf("%s, %v: %w", x.name, m, err)
				}
			}
		}
	}
	fmt.Fprint(progress, "\r\033[K")
	return all, nil
}

// add reads the figures from the output of a run.
func (all *results) add(name string, m mode, line []byte) error {
	var got map[string]any
	if err := json.Unmarshal(line, &got); err != nil {
		return fmt.Errorf("printed %q: %w", line, err)
	}
	for _, x := range metrics {
		if x.mode != m.name {
			continue
		}
		if value, ok := got[x.field].(float64); ok {
			at := cell{name, m, x.field}
			all.values[at] = append(all.values[at], value)
		}
	}
	if digest, ok := got["digest"].(string); ok {
		all.digests[name] = append(all.digests[name], digest)
	}
	return nil
}

// output runs a command and returns the output. An error contains the command's error output.
func output(ctx context.Context, words ...string) ([]byte, error) {
	if len(words) == 0 {
		return nil, errors.New("no command")
	}
	c := exec.CommandContext(ctx, words[0], words[1:]...)
	var complaint bytes.Buffer
	c.Stderr = &complaint
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(words, " "), err, bytes.TrimSpace(complaint.Bytes()))
	}
	return out, nil
}
