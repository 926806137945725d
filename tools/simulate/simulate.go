// Package simulate provides worker-shim simulate: a simulated engine with generated conversations, for trials without a
// GPU.
package simulate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/openaisim"
	"github.com/kvatlas/kvatlas/tools/trace"
	"github.com/spf13/cobra"
)

// simulating has the flags of worker-shim simulate.
type simulating struct {
	endpoint, replay    string
	blockSize, capacity int
	seed                uint64
	requests            int
	rate                float64
	once                bool
	promptFile          string
	serve, model        string
}

// Command is worker-shim simulate.
func Command() *cobra.Command {
	s := &simulating{}
	cmd := &cobra.Command{
		Use:   "simulate [--endpoint tcp://HOST:PORT --replay tcp://HOST:PORT]",
		Short: "Run a simulated engine with KV-cache events, to try kvatlas without a GPU",
		Long: `Run a simulated engine until stopped. The engine serves generated conversations with a block cache and announces stores
and evictions as vLLM does, on a ZeroMQ socket with a replay socket. Equal seeds serve equal prompts with equal blocks.

With --serve HOST:PORT the engine also serves completions and chats of OpenAI's API as --model. A word is a token.

With --print-prompt FILE the engine writes the token ids of the last prompt to FILE, for indexer query --tokens-file
FILE. With --once the engine stays idle after --requests requests, so the last prompt and the blocks are always the
same.`,
		Example: `  worker-shim simulate --print-prompt prompt.json
  worker-shim run --engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657 --worker sim --model sim --block-size 16
  indexer query --model sim --tokens-file prompt.json`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&s.endpoint, "endpoint", "tcp://127.0.0.1:5557", "endpoint for events; port 0 selects a free port")
	f.StringVar(&s.replay, "replay", "tcp://127.0.0.1:5657", "endpoint for replay requests")
	f.IntVar(&s.blockSize, "block-size", 16, fmt.Sprintf("tokens in a block; divides %d", trace.BlockTokens))
	f.IntVar(&s.capacity, "capacity", 20_000, "capacity of the cache in blocks")
	f.Uint64Var(&s.seed, "seed", 1, "seed of the conversations")
	f.IntVar(&s.requests, "requests", 10_000, "requests until the conversations begin again from the first")
	f.BoolVar(&s.once, "once", false, "stay idle after --requests requests, except for requests of clients")
	f.Float64Var(&s.rate, "rate", 5, "requests per second; 0, with --serve: only requests of clients")
	f.StringVar(&s.serve, "serve", "", "HOST:PORT for OpenAI's API; port 0 selects a free port")
	f.StringVar(&s.model, "model", "sim", "of --serve: the model's name")
	f.StringVar(&s.promptFile, "print-prompt", "",
		"file for the token ids of the last prompt as a JSON array, updated at most once a second")
	logger := cli.LogFlags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		if err := s.check(); err != nil {
			return err
		}
		return s.run(cmd.Context(), log)
	}
	return cmd
}

// check returns all faults of the flags.
func (s *simulating) check() error {
	var errs []error
	for _, e := range []struct{ name, value string }{{"--endpoint", s.endpoint}, {"--replay", s.replay}} {
		if err := zmtp.CheckEndpoint(e.value); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", e.name, err))
		}
	}
	if err := trace.CheckBlockSize(s.blockSize); err != nil {
		errs = append(errs, fmt.Errorf("--block-size: %w", err))
	}
	if s.capacity < 1 {
		errs = append(errs, fmt.Errorf("--capacity %d is not positive", s.capacity))
	}
	if s.requests < 1 {
		errs = append(errs, fmt.Errorf("--requests %d is not positive", s.requests))
	}
	if !(s.rate > 0 && s.rate <= 10_000 || s.rate == 0 && s.serve != "") {
		errs = append(errs, fmt.Errorf("--rate %v is not above 0 and at most 10,000", s.rate))
	}
	if err := errors.Join(errs...); err != nil {
		return cli.UsageErrorf("%w", err)
	}
	return nil
}

// run serves the conversations, over and over, until ctx ends.
func (s *simulating) run(ctx context.Context, log *slog.Logger) error {
	// until Stop, because a started request is completed
	engine, err := enginesim.Start(context.WithoutCancel(ctx), enginesim.Config{
		Endpoint: s.endpoint, Replay: s.replay, BlockSize: s.blockSize, Capacity: s.capacity, Seed: s.seed,
	})
	if err != nil {
		return err
	}
	defer engine.Stop()
	if s.serve != "" {
		api, err := openaisim.Start(s.serve, openaisim.Options{Model: s.model, BlockSize: s.blockSize, Tokens: 1,
			Serve: engine.Serve})
		if err != nil {
			return fmt.Errorf("--serve: %w", err)
		}
		defer api.Kill()
		log.Info("OpenAI's API is served", "listen", api.Addr, "model", s.model)
	}
	requests := trace.Generate(trace.Options{Seed: s.seed, Requests: s.requests})
	log.Info("simulated engine runs", "endpoint", engine.Endpoint(), "replay", engine.Replay(), "block_size",
		s.blockSize, "capacity", s.capacity)
	return s.serveAll(ctx, log, engine, requests)
}

// serveAll serves requests at the rate, over and over or once, until ctx ends.
func (s *simulating) serveAll(ctx context.Context, log *slog.Logger, engine *enginesim.Engine,
	requests []trace.Request,
) error {
	var due <-chan time.Time
	if s.rate > 0 {
		tick := time.NewTicker(time.Duration(float64(time.Second) / s.rate))
		defer tick.Stop()
		due = tick.C
	}
	var prompt, output []uint32
	var printed time.Time
	for i := 0; ; i = (i + 1) % len(requests) {
		select {
		case <-ctx.Done():
			log.Info("stopped")
			return nil
		case <-due:
		}
		prompt, output = requests[i].PromptTokens(prompt[:0], s.blockSize), requests[i].OutputTokens(output[:0], i)
		hit, err := engine.Serve(prompt, output)
		if err != nil {
			return fmt.Errorf("serve request %d: %w", i, err)
		}
		last := s.once && i == len(requests)-1
		if s.promptFile != "" && (last || time.Since(printed) >= time.Second) {
			if err := printPrompt(s.promptFile, prompt); err != nil {
				return fmt.Errorf("--print-prompt: %w", err)
			}
			if printed.IsZero() {
				log.Info("the last prompt is written to a file", "file", s.promptFile)
			}
			printed = time.Now()
		}
		log.Debug("served", "request", i, "tokens", len(prompt), "hit_blocks", hit)
		if last {
			log.Info("all requests are served; the engine stays idle", "requests", len(requests))
			due = nil
		}
	}
}

// printPrompt writes token ids as a JSON array. A reader of the file always finds a whole prompt:
// the earlier or the new prompt.
func printPrompt(file string, tokens []uint32) error {
	text, err := json.Marshal(tokens)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}
