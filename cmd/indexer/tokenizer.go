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
		Short: "Check the tokenizers of texts",
	}, tokenizerCheckCommand())
}

func tokenizerCheckCommand() *cobra.Command {
	var file, model, against, as, texts, tokenFile string
	var render, asJSON bool
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
	f := cmd.Flags()
	f.StringVar(&file, "tokenizers", "", "YAML file with tokenizers by model, as for serve")
	f.StringVar(&model, "model", "", "the model, by the name in the file")
	f.StringVar(&against, "against", "", "URL of the server for the comparison, http://HOST:PORT")
	f.StringVar(&as, "as", "", "the model, by the name in the server (default: the name in the file)")
	f.BoolVar(&render, "render", false, "use the server's renderer (vllm launch render) in place of the tokenizer")
	f.StringVar(&texts, "texts", "", "file with more texts: per line a prompt, or a request as JSON")
	f.StringVar(&tokenFile, "token-file", "", "file with the bearer token for the server")
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
