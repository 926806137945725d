package remote

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Prompt holds the flags of a command with a prompt.
type Prompt struct {
	query                      *api.Query
	tokens, tokensFile, hashes string
	promptFile, messagesFile   string
	returnTokens               bool
	engineHashes               string
	media                      []string
	workers, endpoints         []string
}

// Flags returns the table of the flags, which belong to a query. workers is the help text of --worker.
func (p *Prompt) Flags(q *api.Query, workers string) cli.Flags {
	p.query = q
	return cli.Flags{
		cli.Var(&q.Model, "model", "",
			"model of the prompt (required)"),
		cli.Var(&p.tokens, "tokens", "",
			"the prompt's token ids"),
		cli.Var(&p.tokensFile, "tokens-file", "",
			"file with the prompt's token ids; - is standard input"),
		cli.Var(&p.hashes, "hashes", "",
			"local hashes of the prompt's blocks, in place of tokens"),
		cli.Var(&p.promptFile, "prompt-file", "",
			"file with the prompt's text, in place of tokens, if the node is set to make tokens; - is standard input"),
		cli.Var(&p.messagesFile, "messages-file", "",
			"JSON file with a chat's messages, or with a whole request of an OpenAI client; - is standard input"),
		cli.Var(&p.returnTokens, "return-token-ids", false,
			"with a text and --json: include the tokens in the answer"),
		cli.Var(&p.engineHashes, "engine-hashes", "",
			"the engine's hashes of the prompt's blocks, as in the engine's events, in place of tokens"),
		cli.Var(&q.BlockSize, "block-size", 0,
			"tokens in a block; an error if the model's workers have another"),
		cli.Var(&q.LoRA, "lora", "",
			"name of the LoRA adapter; lora_id:NUMBER if the engine announces only the number"),
		cli.Var(&q.CacheSalt, "cache-salt", "",
			"cache salt"),
		cli.Var(&p.workers, "worker", nil,
			workers+"; may be given several times"),
		cli.Var((*string)(&q.L3), "l3", "",
			"blocks to request from the shared store: all, beyond (all blocks without a worker), off (default: the loads of "+
				"workers)"),
		cli.Each(&p.media, "media", // the value may have commas
			"ID@OFFSET+LENGTH: an image or a similar item in the tokens, by the engine's identifier, with the place of the "+
				"item's tokens, counted from 0; may be given several times, in order"),
		cli.Each(&p.endpoints, "endpoint",
			"in place of --worker: the registered serving addresses of workers; may be given several times"),
	}
}

// sources returns the function that reads the prompt of each flag.
func (p *Prompt) sources() map[string]func(*api.Query) error {
	return map[string]func(*api.Query) error{
		"tokens": func(q *api.Query) (err error) {
			q.Tokens, err = numbers[uint32](strings.NewReader(p.tokens), 32)
			return err
		},
		"tokens-file": func(q *api.Query) (err error) {
			q.Tokens, err = numbersIn(p.tokensFile)
			return err
		},
		"hashes": func(q *api.Query) (err error) {
			q.Hashes, err = numbers[uint64](strings.NewReader(p.hashes), 64)
			return err
		},
		"prompt-file": func(q *api.Query) error {
			text, err := readInput(p.promptFile)
			q.Text = &api.Text{Prompt: string(text)}
			return err
		},
		"messages-file": func(q *api.Query) (err error) {
			q.Text, err = readChat(p.messagesFile)
			return err
		},
		"engine-hashes": func(q *api.Query) (err error) {
			q.EngineHashes, err = numbers[uint64](strings.NewReader(p.engineHashes), 64)
			return err
		},
	}
}

// Read completes the query with the prompt, the workers and the addresses in the flags.
func (p *Prompt) Read(cmd *cobra.Command) error {
	q := p.query
	if q.Model == "" {
		return cli.UsageErrorf("--model is missing")
	}
	q.Workers, q.Endpoints = Workers(p.workers), p.endpoints
	given := 0
	for name, read := range p.sources() {
		if !cmd.Flags().Changed(name) {
			continue
		}
		if given++; given > 1 {
			return cli.UsageErrorf("give one of --tokens, --tokens-file, --hashes, --engine-hashes, --prompt-file and " +
				"--messages-file")
		}
		if err := read(q); err != nil {
			return cli.UsageErrorf("--%s: %w", name, err)
		}
	}
	if given == 0 {
		return cli.UsageErrorf("give --tokens, --tokens-file, --hashes, --engine-hashes, --prompt-file or --messages-file")
	}
	for _, text := range p.media {
		item, err := mediaItem(text)
		if err != nil {
			return err
		}
		q.Media = append(q.Media, item)
	}
	if p.returnTokens && q.Text == nil {
		return cli.UsageErrorf("--return-token-ids goes with --prompt-file or --messages-file")
	}
	if q.Text != nil {
		q.ReturnTokenIDs = p.returnTokens // a field of the text
	}
	return nil
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
	f, err := OpenInput(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return numbers[uint32](f, 32)
}

// readInput reads a file, or standard input.
func readInput(path string) ([]byte, error) {
	f, err := OpenInput(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// OpenInput opens a file, or standard input for the path -.
func OpenInput(path string) (io.ReadCloser, error) {
	if path == "-" {
		return io.NopCloser(os.Stdin), nil
	}
	return os.Open(path)
}

// readChat reads messages, or a request with messages. readChat ignores the rest of the request.
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
		err = errors.New("no messages: the file has neither a list nor an object with a list named messages")
	}
	t.Prompt = ""
	return t, err
}

// numbers parses whole numbers separated by blanks or commas, with or without brackets.
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

// ParseRank parses WORKER or WORKER/RANK, the value of a flag.
func ParseRank(flag, text string) (*routing.Target, error) {
	worker, rank, has := text, "", false
	if i := strings.LastIndexByte(text, '/'); i >= 0 {
		worker, rank, has = text[:i], text[i+1:], true
	}
	t := &routing.Target{Worker: events.WorkerID(worker)}
	if has {
		v, err := strconv.ParseUint(rank, 10, 32)
		if err != nil {
			return nil, cli.UsageErrorf("--%s %q: the rank is %.40q, not an unsigned 32-bit number", flag, text, rank)
		}
		t.Rank = new(events.Rank)
		*t.Rank = events.Rank(v)
	}
	return t, nil
}

// ParseRanks parses a list of WORKER/RANK, the values of a flag.
func ParseRanks(flag string, texts []string) (list []api.RankPlace, err error) {
	for _, text := range texts {
		t, err := ParseRank(flag, text)
		if err != nil {
			return nil, err
		}
		if t.Rank == nil {
			return nil, cli.UsageErrorf("--%s %q is not WORKER/RANK", flag, text)
		}
		list = append(list, api.RankPlace{Instance: t.Worker, Rank: *t.Rank})
	}
	return list, nil
}

// Workers converts the values of a flag; nil without values.
func Workers(names []string) (list []events.WorkerID) {
	for _, name := range names {
		list = append(list, events.WorkerID(name))
	}
	return list
}
