package corpus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/kvatlas/kvatlas/tools/trace"
)

// Job describes a corpus file to make.
type Job struct {
	Options

	// Trace is a file in Mooncake's format. Empty: the trace is generated.
	Trace string

	// Seed and Clump are the fields of [trace.Options] for a generated trace with Options.Requests requests.
	Seed  uint64
	Clump int

	// Out is the path of the file. A complete file replaces an earlier file at the end.
	Out string
}

// Run makes a corpus file and writes progress messages.
func Run(ctx context.Context, job Job, progress io.Writer) (Header, error) {
	if err := job.Validate(); err != nil {
		return Header{}, fmt.Errorf("make corpus: %w", err)
	}
	if job.Out == "" {
		return Header{}, errors.New("make corpus: no file to write is named")
	}
	reqs, from, err := job.requests()
	if err != nil {
		return Header{}, err
	}
	fmt.Fprintf(progress, "%s: %d requests of %s, %d workers …\n", job.Out, len(reqs), from, job.Workers)
	h, err := writeFile(ctx, job.Options, reqs, job.Out)
	if err != nil {
		return Header{}, err
	}
	fmt.Fprintf(progress,
		"%s: %d operations, %d blocks stored, %d removed; %d queries of %d blocks; %d holdings at the end, %d distinct\n",
		job.Out, h.Ops, h.Stored, h.Removed, h.Queries, h.QueryBlocks, h.LiveAtEnd, h.DistinctAtEnd)
	return h, nil
}

func (job *Job) requests() (reqs []trace.Request, from string, err error) {
	if job.Trace == "" {
		return trace.Generate(trace.Options{Seed: job.Seed, Requests: job.Requests, Clump: job.Clump}),
			fmt.Sprintf("seed %d", job.Seed), nil
	}
	if reqs, err = trace.ReadFile(job.Trace, job.Requests); err != nil {
		return nil, "", fmt.Errorf("make corpus: %w", err)
	}
	if len(reqs) == 0 {
		return nil, "", fmt.Errorf("make corpus: %s: %w", job.Trace, trace.ErrFormat)
	}
	return reqs, job.Trace, nil
}

// writeFile writes a temporary file first and renames the complete file, so a partial corpus never has the final name.
func writeFile(ctx context.Context, o Options, reqs []trace.Request, path string) (h Header, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.part")
	if err != nil {
		return h, fmt.Errorf("make corpus: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if h, err = Write(ctx, o, reqs, f); err != nil {
		return h, err
	}
	if err = f.Close(); err == nil {
		err = os.Chmod(f.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return h, fmt.Errorf("make corpus: %w", err)
	}
	return h, nil
}
