package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
)

func tokenizerCommand() *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "tokenizer",
		Short: "Check the tokenizers of texts",
	}, tokenizerCheckCommand())
}

func tokenizerCheckCommand() *cobra.Command {
	c := &tokenize.ServerCheck{}
	var tokenFile string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check --tokenizers FILE --model M --against URL",
		Short: "Compare a model's tokenizer with an engine",
		Long: `Tokenize the same texts with the tokenizer of a model in --tokenizers and with a server of vLLM or SGLang:
prompts in many scripts, chats, tools. The command prints the differences. Exit status 1 for a difference or an
unreachable server. Texts refused by the tokenizer or by the server are only counted. Requests with refused texts are
routed by load.`,
		Example: `  indexer tokenizer check --tokenizers tokenizers.yaml --model llama --against http://llama-1:8000
  indexer tokenizer check --tokenizers tokenizers.yaml --model llama --against http://render-1:8000 --render
  indexer tokenizer check --tokenizers tokenizers.yaml --model llama --against http://llama-1:8000 --texts chats.jsonl`,
		Args: cobra.NoArgs,
	}
	cli.Output[[]tokenize.Comparison](cmd)
	cli.Explain(cmd, tables.ComparedColumns)
	return cli.Command(cmd, cli.Flags{
		cli.Var(&c.File, "tokenizers", "", "YAML file with tokenizers by model, as for serve"),
		cli.Var(&c.Model, "model", "", "the model, by the name in the file"),
		cli.Var(&c.Against, "against", "", "URL of the server for the comparison, http://HOST:PORT"),
		cli.Var(&c.As, "as", "", "the model, by the name in the server (default: the name in the file)"),
		cli.Var(&c.Render, "render", false,
			"use the server's renderer (vllm launch render) in place of the tokenizer"),
		cli.Var(&c.Texts, "texts", "", "file with more texts: per line a prompt, or a request as JSON"),
		cli.Var(&tokenFile, "token-file", "", "file with the bearer token for the server"),
		cli.JSONFlag(&asJSON),
	}, nil, func(ctx context.Context, _ []string) (err error) {
		if c.Token, err = cli.TokenFile("token-file", tokenFile); err != nil {
			return err
		}
		compared, err := c.Run(ctx)
		if err != nil {
			return err
		}
		if asJSON {
			err = cli.PrintJSON(cmd.OutOrStdout(), compared)
		} else {
			err = remote.Buffered(cmd.OutOrStdout(), func(w io.Writer) { tables.Compared(w, compared) })
		}
		if err != nil {
			return err
		}
		return tokenize.Disagreement(compared)
	})
}
