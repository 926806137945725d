package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// version is the one place where the release is named. CHANGELOG.md has a heading for it, and docs show it; a test
// holds them to this.
const version = "v0.4.0"

// Version is the programs' version, the same in both, in what a node says of itself and in its NATS service.
func Version() string { return version }

// build is what `version --json` prints. Commit and Time are empty where the toolchain did not see the repository.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Time     string `json:"commit_time,omitempty"` // of the commit
	Modified bool   `json:"modified,omitempty"`    // built from files that are not the commit's
	Go       string `json:"go"`
}

// thisBuild reads what the toolchain wrote into the program.
func thisBuild() build {
	b := build{Version: version, Go: runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.Time = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

// String is one line for people.
func (b build) String() string {
	words := []string{b.Version}
	if b.Commit != "" {
		words = append(words, "commit "+b.Commit[:min(12, len(b.Commit))])
	}
	if b.Modified {
		words = append(words, "modified")
	}
	return strings.Join(append(words, b.Go), ", ")
}

func versionCommand() *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print which version this is, and which commit it was built from",
		Args:  cobra.NoArgs,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON for programs")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		b := thisBuild()
		if asJSON {
			return PrintJSON(cmd.OutOrStdout(), b)
		}
		_, err := fmt.Fprintln(cmd.OutOrStdout(), cmd.Root().Name(), b)
		return err
	}
	return cmd
}
