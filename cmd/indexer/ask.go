package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// asking holds the flags that all commands with requests to a running indexer share.
type asking struct {
	nats      *cli.NATS
	http      httpFlags // none for commands that need NATS
	flags     *pflag.FlagSet
	namespace string
	timeout   time.Duration
	json      bool
}

func askingFlags(cmd *cobra.Command) *asking {
	a := storeFlags(cmd)
	a.http.add(cmd.Flags())
	return a
}

// storeFlags adds the flags of askingFlags for a command that needs JetStream, which HTTP cannot replace.
func storeFlags(cmd *cobra.Command) *asking {
	a := connectFlags(cmd)
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON for programs instead of a table")
	return a
}

// connectFlags is storeFlags for a command that prints no JSON.
func connectFlags(cmd *cobra.Command) *asking {
	a := &asking{nats: cli.NATSFlags(cmd.Flags(), false), flags: cmd.Flags()}
	cmd.Flags().StringVar(&a.namespace, "namespace", "default", "name of the deployment; several may share NATS servers")
	cmd.Flags().DurationVar(&a.timeout, "timeout", 5*time.Second, "how long to wait for the answer")
	cmd.Args = cobra.NoArgs
	return a
}

// check rejects settings that are invalid for every command.
func (a *asking) check() error {
	if err := jetstream.CheckNamespace(a.namespace); err != nil {
		return cli.UsageErrorf("--namespace: %w", err)
	}
	if a.timeout <= 0 {
		return cli.UsageErrorf("--timeout %v is not positive", a.timeout)
	}
	return nil
}

// ask sends a request to indexers, which needs no JetStream.
func ask[T any](
	ctx context.Context, a *asking, what func(context.Context, *client.Client) (T, error),
) (answer T, err error) {
	if err := a.check(); err != nil {
		return answer, err
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	c, err := a.open(ctx)
	if err != nil {
		return answer, err
	}
	defer c.Close()
	answer, err = what(ctx, c.Client)
	err = denied(err)
	if client.CodeOf(err) == api.CodeTooLarge && c.conn != nil { // a message of NATS has less room
		if over, bad := a.http.client(); bad == nil && over != nil {
			return what(ctx, over)
		}
	}
	return answer, err
}

// denied adds the missing flag or right to the error of a refused subject.
func denied(err error) error {
	if err == nil || cli.RefusalAdvice(err) == "" {
		return err
	}
	return fmt.Errorf("%w; what to do: %s", err, cli.RefusalAdvice(err))
}

// show sends a request to indexers, and prints the answer as JSON or with print. With --json, it also prints the error
// of a node as JSON.
func show[T any](
	ctx context.Context, a *asking, what func(context.Context, *client.Client) (T, error), print func(io.Writer, T),
) (answer T, err error) {
	if answer, err = ask(ctx, a, what); err != nil {
		return answer, a.refused(err)
	}
	if a.json {
		return answer, cli.PrintJSON(os.Stdout, answer)
	}
	return answer, printed(os.Stdout, func(w io.Writer) { print(w, answer) })
}

// printed calls print with a writer, and returns the first error of the writer.
func printed(to io.Writer, print func(io.Writer)) error {
	w := bufio.NewWriter(to)
	print(w)
	return w.Flush()
}

// refused returns the error. With --json, it first prints the error of a node as JSON.
func (a *asking) refused(err error) error {
	if failure, is := errors.AsType[*api.Error](err); is && a.json {
		if err := cli.PrintJSON(os.Stdout, api.ErrorBody{Error: failure}); err != nil {
			return err
		}
	}
	return err
}

// reach connects to NATS and opens the namespace, for commands that need no indexer. The context of do has no deadline,
// but a request to JetStream waits for at most --timeout.
func (a *asking) reach(ctx context.Context, do func(context.Context, *jetstream.Namespace) error) error {
	if err := a.check(); err != nil {
		return err
	}
	opening, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	conn, err := a.nats.Connect(opening, "kvatlas indexer", a.timeout)
	if err != nil {
		return denied(err)
	}
	defer conn.Close()
	ns, err := jetstream.OpenNamespace(opening, conn, a.namespace)
	if err == nil {
		err = do(ctx, ns)
	}
	err = denied(err)
	if errors.Is(err, jetstream.ErrUnavailable) && !errors.Is(err, jetstream.ErrNoLeader) && conn.Connected() {
		return fmt.Errorf("%w: %w", jetstream.ErrNoLeader, err)
	}
	return err
}

// promptFlags are the flags of commands with a prompt.
type promptFlags struct {
	query                      api.Query
	tokens, tokensFile, hashes string
	promptFile, messagesFile   string
	returnTokens               bool
	engineHashes               string
	media                      []string
	workers, endpoints         []string
}

func (p *promptFlags) add(cmd *cobra.Command, workers string) {
	f := cmd.Flags()
	f.StringVar(&p.query.Model, "model", "", "model that the prompt is for (required)")
	f.StringVar(&p.tokens, "tokens", "", "the prompt's token ids")
	f.StringVar(&p.tokensFile, "tokens-file", "", "file with the prompt's token ids; - is standard input")
	f.StringVar(&p.hashes, "hashes", "", "local hashes of the prompt's blocks, in place of tokens")
	f.StringVar(&p.promptFile, "prompt-file", "",
		"file with the prompt's text, in place of tokens, if the node is set to make tokens; - is standard input")
	f.StringVar(&p.messagesFile, "messages-file", "",
		"JSON file with a chat's messages, or with a whole request of an OpenAI client; - is standard input")
	f.BoolVar(&p.returnTokens, "return-token-ids", false, "with a text and --json: have its tokens in the answer")
	f.StringVar(&p.engineHashes, "engine-hashes", "",
		"the engine's own hashes of the prompt's blocks, as its events have them, in place of tokens")
	f.Uint32Var(&p.query.BlockSize, "block-size", 0, "tokens in a block; an error if the model's workers have another")
	f.StringVar(&p.query.LoRA, "lora", "",
		"name of the LoRA adapter; lora_id:NUMBER if its engine announces the number only")
	f.StringVar(&p.query.CacheSalt, "cache-salt", "", "cache salt")
	f.StringArrayVar(&p.media, "media", nil,
		"ID@OFFSET+LENGTH: an image or the like in the tokens, by the identifier that the engine gives it, and which tokens "+
			"stand for it, counted from 0; may be given several times, in order")
	f.StringSliceVar(&p.workers, "worker", nil, workers+"; may be given several times")
	f.StringArrayVar(&p.endpoints, "endpoint", nil,
		"in place of --worker: these serving addresses, as workers are registered with them; may be given several times")
	f.StringVar((*string)(&p.query.L3), "l3", "",
		"what the shared store is asked for: all, beyond (all that no worker has), off (default: what workers would load)")
}

// read returns the query of the flags.
func (p *promptFlags) read(cmd *cobra.Command) (api.Query, error) {
	q := p.query
	if q.Model == "" {
		return q, cli.UsageErrorf("--model is missing")
	}
	for _, w := range p.workers {
		q.Workers = append(q.Workers, events.WorkerID(w))
	}
	q.Endpoints = p.endpoints
	given := 0
	for name, read := range map[string]func() error{
		"tokens": func() (err error) {
			q.Tokens, err = numbers[uint32](strings.NewReader(p.tokens), 32)
			return err
		},
		"tokens-file": func() (err error) {
			q.Tokens, err = numbersIn(p.tokensFile)
			return err
		},
		"hashes": func() (err error) {
			q.Hashes, err = numbers[uint64](strings.NewReader(p.hashes), 64)
			return err
		},
		"prompt-file": func() error {
			text, err := readInput(p.promptFile)
			q.Text = &api.Text{Prompt: string(text)}
			return err
		},
		"messages-file": func() (err error) {
			q.Text, err = readChat(p.messagesFile)
			return err
		},
		"engine-hashes": func() (err error) {
			q.EngineHashes, err = numbers[uint64](strings.NewReader(p.engineHashes), 64)
			return err
		},
	} {
		if cmd.Flags().Changed(name) {
			if given++; given > 1 {
				return q, cli.UsageErrorf("give one of --tokens, --tokens-file, --hashes, --engine-hashes, --prompt-file and " +
					"--messages-file")
			}
			if err := read(); err != nil {
				return q, cli.UsageErrorf("--%s: %w", name, err)
			}
		}
	}
	if given == 0 {
		return q, cli.UsageErrorf("give --tokens, --tokens-file, --hashes, --engine-hashes, --prompt-file or --messages-file")
	}
	for _, text := range p.media {
		item, err := mediaItem(text)
		if err != nil {
			return q, err
		}
		q.Media = append(q.Media, item)
	}
	if p.returnTokens && q.Text == nil {
		return q, cli.UsageErrorf("--return-token-ids goes with --prompt-file or --messages-file")
	}
	if q.Text != nil {
		q.ReturnTokenIDs = p.returnTokens
	}
	return q, nil
}

func queryCommand() *cobra.Command {
	var prompt promptFlags
	var explain, endpoints bool
	var ranks, within []string
	cmd := &cobra.Command{
		Use:   "query --model M (--tokens 1,2,3 | --tokens-file F | --hashes H,H | --prompt-file F | --messages-file F)",
		Short: "Ask which worker holds how much of a prompt",
		Long: `Ask which worker holds how much of a prompt, in blocks: DEVICE counts the leading blocks in device memory, HOST those
that follow directly in host memory, and so on. Tokens are whole numbers with commas or blanks between; a file of them
may also be a JSON array, and - is standard input. --explain shows block by block which worker holds it in which tier
and whether the shared store has it, and for each worker the rule that stopped its own prefix, and what it would load.
GUESSED counts the leading blocks that a worker probably holds in device memory, as requests were sent there, though its
events do not say so.`,
		Example: `  indexer query --model llama --tokens-file prompt.json
  indexer query --model llama --tokens-file prompt.json --explain
  indexer query --model llama --messages-file chat.json
  indexer query --model llama --tokens-file prompt.json --rank worker-1/0 --rank worker-1/1
  indexer query --model llama --hashes 13226331709069118873 --json`,
	}
	a := askingFlags(cmd)
	prompt.add(cmd, "look at this worker only")
	cmd.Flags().StringSliceVar(&ranks, "rank", nil,
		"WORKER/RANK: look at this rank only, in place of --worker; may be given several times")
	cmd.Flags().StringSliceVar(&within, "within", nil,
		"TIER+TIER: show how much of the prompt each worker has within these tiers alone, whichever of them a block is in; "+
			"may be given several times")
	cmd.Flags().BoolVar(&explain, "explain", false, "show where each block is, and which rule stopped each worker")
	cmd.Flags().BoolVar(&endpoints, "with-endpoint", false,
		"show the address that each worker is registered with, as --endpoint does")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		q, err := prompt.read(cmd)
		if err != nil {
			return err
		}
		q.Explain, q.WithEndpoint, q.Diagnostic = explain, endpoints, true
		for _, set := range within {
			q.Within = append(q.Within, api.Tiers(set))
		}
		for _, text := range ranks {
			at, err := target("rank", text)
			if err != nil {
				return err
			}
			if at.Rank == nil {
				return cli.UsageErrorf("--rank %q is not WORKER/RANK", text)
			}
			q.Ranks = append(q.Ranks, api.RankPlace{Instance: at.Worker, Rank: *at.Rank})
		}
		if err := q.Check(); err != nil {
			return a.refused(cli.UsageErrorf("%w", err))
		}
		_, err = show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Answer, error) {
			return c.Find(ctx, &q)
		}, func(w io.Writer, answer *api.Answer) { tables.Answer(w, answer, &q) })
		return err
	}
	return cmd
}

// mediaItem parses ID@OFFSET+LENGTH.
func mediaItem(text string) (item events.MediaItem, err error) {
	at := strings.LastIndexByte(text, '@')
	offset, length, both := strings.Cut(text[at+1:], "+")
	place, err := numbers[uint32](strings.NewReader(offset+" "+length), 32)
	if at < 1 || !both || err != nil || len(place) != 2 {
		return item, cli.UsageErrorf("--media %q is not ID@OFFSET+LENGTH", text)
	}
	return events.MediaItem{Hash: events.MediaHash(text[:at]), Offset: place[0], Length: place[1]}, nil
}

// numbersIn reads the numbers in a file.
func numbersIn(path string) ([]uint32, error) {
	if path == "-" {
		return numbers[uint32](os.Stdin, 32)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return numbers[uint32](f, 32)
}

// readInput reads a file, or standard input.
func readInput(path string) ([]byte, error) {
	if path == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(path)
}

// readChat reads messages, or a request with messages. It ignores the rest of the request.
func readChat(path string) (*api.Text, error) {
	data, err := readInput(path)
	if err != nil {
		return nil, err
	}
	t := &api.Text{}
	if list := bytes.TrimSpace(data); len(list) > 0 && list[0] == '[' {
		err = json.Unmarshal(data, &t.Messages)
	} else {
		err = json.Unmarshal(data, t)
	}
	if err == nil && t.Messages == nil {
		err = errors.New("it has no messages: it is neither a list nor an object that has one under that name")
	}
	t.Prompt = ""
	return t, err
}

// numbers parses whole numbers with blanks or commas between them, with or without brackets.
func numbers[T uint32 | uint64](r io.Reader, bits int) ([]T, error) {
	out := []T{}
	text, err := io.ReadAll(r)
	between := func(c rune) bool { return strings.ContainsRune(", \t\r\n[]", c) }
	for word := range strings.FieldsFuncSeq(string(text), between) {
		v, err := strconv.ParseUint(word, 10, bits)
		if err != nil {
			return nil, fmt.Errorf("number %d is %.40q, not an unsigned %d-bit number", len(out)+1, word, bits)
		}
		out = append(out, T(v))
	}
	return out, err
}
