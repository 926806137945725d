package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/spf13/cobra"
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
		settings, err := readTokenizers(file)
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
		list, err := textsToCompare(texts)
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
			err = printed(cmd.OutOrStdout(), func(w io.Writer) { printCompared(w, compared) })
		}
		if err != nil {
			return err
		}
		return comparedError(compared)
	}
	return cmd
}

// textsToCompare are the samples, and those of a file.
func textsToCompare(path string) ([]api.Text, error) {
	list := tokenize.Samples()
	if path == "" {
		return list, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for i, line := range bytes.Split(data, []byte("\n")) {
		if len(line) == 0 {
			continue
		}
		t, err := tokenize.ReadText(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		list = append(list, t)
	}
	return list, nil
}

// verdict is the result of a comparison.
func verdict(c *tokenize.Comparison) string {
	switch {
	case c.Here != tokenize.OK:
		return "refused here"
	case c.There == tokenize.Refused:
		return "refused there"
	case c.There != tokenize.OK:
		return "NOT COMPARED"
	case c.Differs:
		return fmt.Sprintf("DIFFERS from token %d on", c.At)
	}
	return "same"
}

// tally counts verdicts. All that differ are one.
func tally(list []tokenize.Comparison) map[string]int {
	counts := map[string]int{}
	for i := range list {
		if c := &list[i]; c.Differs {
			counts["differ"]++
		} else {
			counts[verdict(c)]++
		}
	}
	return counts
}

func printCompared(w io.Writer, list []tokenize.Comparison) {
	counts := tally(list)
	var rows [][]any
	for i := range list {
		if v := verdict(&list[i]); v != "same" {
			rows = append(rows, []any{v, fmt.Sprintf("%q", list[i].Text), list[i].Error})
		}
	}
	if len(rows) > 0 {
		cli.Table(w, []string{"", "TEXT", ""}, rows)
		cli.Fprintln(w)
	}
	cli.Fprintf(w, "%d texts: %d same, %d differ, %d refused here, %d refused there, %d not compared\n", len(list),
		counts["same"], counts["differ"], counts["refused here"], counts["refused there"], counts["NOT COMPARED"])
}

// comparedError is nil if texts were compared and none differs.
func comparedError(list []tokenize.Comparison) error {
	counts := tally(list)
	same, differ, not := counts["same"], counts["differ"], counts["NOT COMPARED"]
	switch {
	case differ > 0:
		return fmt.Errorf("%d texts have other tokens there: the model, its template or the server's settings are others; "+
			"give the model a render or tokenize URL", differ)
	case not > 0 || same == 0:
		return fmt.Errorf("%d texts could be compared, and %d not: see what the server says", same, not)
	}
	return nil
}
