package cli

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// TestCommand: a command runs only after all checks of its table and of several flags, and reports all errors together.
func TestCommand(t *testing.T) {
	for _, c := range []struct {
		args  []string
		wrong []string // errors; none: the command runs
	}{
		{[]string{"--model", "m", "--media", "a,b", "--media", "c", "arg"}, nil},
		{nil, []string{"--model is missing"}},
		{[]string{"--size", "9", "--wait", "-1s", "--url", "ftp://u:secret@x", "--pair"}, []string{"--model is missing",
			"--size 9 is not from 1 to 8", "--wait -1s is negative",
			`--url "ftp://u:xxxxx@x" is not an http:// or https:// URL`, "--pair goes with --media"}},
	} {
		var model, url string
		var size uint32
		var wait time.Duration
		var pair, ran bool
		var media []string
		cmd := Command(&cobra.Command{Use: "x", SilenceErrors: true, SilenceUsage: true}, Flags{
			Var(&model, "model", "", "", Required[string]("is missing")),
			Var(&size, "size", 1, "", Between[uint32](1, 8)),
			Var(&wait, "wait", 0, "", NotNegative[time.Duration]()),
			Var(&url, "url", "http://x", "", HTTPAddress),
			Var(&pair, "pair", false, ""),
			Each(&media, "media", ""),
		}, func(wrong *Complaints) {
			wrong.When(pair && media == nil, "--pair goes with --media")
		}, func(_ context.Context, args []string) error {
			ran = slices.Equal(args, []string{"arg"}) && slices.Equal(media, []string{"a,b", "c"})
			return nil
		})
		cmd.SetArgs(append([]string{}, c.args...))
		cmd.SetOut(io.Discard)
		err := cmd.Execute()
		if c.wrong == nil {
			if err != nil || !ran {
				t.Errorf("%q: %v, ran %t", c.args, err, ran)
			}
			continue
		}
		if err == nil || err.Error() != strings.Join(c.wrong, "\n") {
			t.Errorf("%q: %v, want %q", c.args, err, c.wrong)
		}
	}
}
