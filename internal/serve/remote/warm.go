package remote

import (
	"strings"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// WarmPrompt reads the flags of a copy of a prefix.
type WarmPrompt struct {
	Request            api.WarmRequest // after Check
	worker             string
	rank               uint32
	tokens, tokensFile string
}

// Flags returns the table of the flags.
func (p *WarmPrompt) Flags() cli.Flags {
	return cli.Flags{
		cli.Var(&p.Request.Model, "model", "", "the model (required)"),
		cli.Var(&p.worker, "worker", "", "the worker that computes the prefix (required)"),
		cli.Var(&p.rank, "rank", 0, "data-parallel rank of the worker"),
		cli.Var(&p.tokens, "tokens", "", "token ids of the prefix, in place of HASH"),
		cli.Var(&p.tokensFile, "tokens-file", "", "file with the token ids; - is standard input"),
		cli.Var(&p.Request.LoRA, "lora", "", "with tokens: name of the LoRA adapter, as the engine serves it"),
		cli.Var(&p.Request.CacheSalt, "cache-salt", "", "with tokens: cache salt"),
	}
}

// Check reads the request from the flags and arguments.
func (p *WarmPrompt) Check(args []string) (err error) {
	r := &p.Request
	r.Worker, r.Rank = events.WorkerID(p.worker), events.Rank(p.rank)
	if len(args) > 0 {
		r.Hash = args[0]
	}
	switch {
	case p.tokens != "" && p.tokensFile != "":
		return cli.UsageErrorf("give one of --tokens and --tokens-file")
	case p.tokens != "":
		r.Tokens, err = numbers[uint32](strings.NewReader(p.tokens), 32)
	case p.tokensFile != "":
		r.Tokens, err = numbersIn(p.tokensFile)
	}
	if err == nil {
		err = r.Check()
	}
	return err
}
