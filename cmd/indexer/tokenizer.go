package main

import (
	"cmp"
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
)

func tokenizerCommand() *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "tokenizer",
		Short: "What makes tokens of texts: check it",
	}, tokenizerCheckCommand())
}

func tokenizerCheckCommand() *cobra.Command {
	var file, model, against, as, texts, tokenFile string
	var render, asJSON bool
	cmd := &cobra.Command{
		Use:   "check --tokenizers FILE --model M --against URL",
		Short: "Compare what makes a model's tokens with an engine",
		Long: `Have what --tokenizers names for a model, and a server of vLLM or SGLang, make tokens of the same texts: prompts in
many scripts, chats, tools. What differs is printed. Exit status 1 if anything does, or if the server cannot be asked.
Texts that are refused here are counted only: their requests are routed by load. So are those that the server refuses.`,
		Example: `  indexer tokenizer check --tokenizers tokenizers.yaml --model llama --against http://llama-1:8000
  indexer tokenizer check --tokenizers tokenizers.yaml --model llama --against http://render-1:8000 --render
  indexer tokenizer check --tokenizers tokenizers.yaml --model llama --against http://llama-1:8000 --texts chats.jsonl`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&file, "tokenizers", "", "YAML file that says what makes tokens for which model, as of serve")
	f.StringVar(&model, "model", "", "the model, as the file calls it")
	f.StringVar(&against, "against", "", "URL of the server that is asked, http://HOST:PORT")
	f.StringVar(&as, "as", "", "the model, as that server calls it (default as the file calls it)")
	f.BoolVar(&render, "render", false, "the server renders (vllm launch render); by default its tokenizer is asked")
	f.StringVar(&texts, "texts", "", "file with more texts: in each line a prompt, or a request as JSON")
	f.StringVar(&tokenFile, "token-file", "", "file with the bearer token that the server wants")
	f.BoolVar(&asJSON, "json", false, "print JSON for programs")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if file == "" || model == "" || against == "" {
			return cli.UsageErrorf("give --tokenizers, --model and --against")
		}
		settings, err := tokenize.ReadSettings(file)
		if err != nil {
			return cli.UsageErrorf("--tokenizers: %w", err)
		}
		here := tokenize.New(tokenize.Config{Settings: settings,
			Endpoints: func(string) []string { return nil }}).Source(model)
		if here == nil {
			return cli.UsageErrorf("--tokenizers: %s names nothing for model %q", file, model)
		}
		kind := tokenize.Tokenize
		if render {
			kind = tokenize.Render
		}
		token, err := cli.TokenFile("token-file", tokenFile)
		if err != nil {
			return err
		}
		there, err := tokenize.Against(kind, against, cmp.Or(as, model), token)
		if err != nil {
			return cli.UsageErrorf("--against: %w", err)
		}
		list, err := tokenize.TextsToCompare(texts)
		if err != nil {
			return cli.UsageErrorf("--texts: %w", err)
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Duration(len(list))*10*time.Second)
		defer cancel()
		compared, err := tokenize.Compare(ctx, here, there, list)
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
	}
	return cmd
}
