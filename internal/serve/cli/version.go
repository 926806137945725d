package cli

import (
	"fmt"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
)

// Release is the last release, with the first heading of CHANGELOG.md. It is the only place of the number: `go generate
// ./tools/release` writes it into the chart, the Python client and the pages, and TestVersionsOfFiles compares them.
const Release = "v0.5.0"

// development is the version of a build that is no release: the minor release after Release, with -dev.
var development = nextMinor(Release) + "-dev"

func nextMinor(release string) string {
	var major, minor, patch int
	if _, err := fmt.Sscanf(release, "v%d.%d.%d", &major, &minor, &patch); err != nil {
		panic(err) // a constant
	}
	return fmt.Sprintf("v%d.%d.0", major, minor+1)
}

// Version returns the version of both programs, as nodes and their NATS service report it. It is the module's version
// for `go install ...@v0.5.0` and for an unmodified build at a tag. All other builds are development builds.
func Version() string { return thisBuild().Version }

// build is the output of `version --json`. Commit and Time are empty if the toolchain had no repository.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Time     string `json:"commit_time,omitempty"` // time of the commit
	Modified bool   `json:"modified,omitempty"`    // built from files that differ from the commit
	Go       string `json:"go"`
}

// thisBuild returns the toolchain's build information.
var thisBuild = sync.OnceValue(func() build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return build{Version: development, Go: runtime.Version()}
	}
	return readBuild(info)
})

// untagged matches the toolchain's version of a commit without a tag: its time and its first digits.
var untagged = regexp.MustCompile(`[-.](\d{14})-([0-9a-f]{12})$`)

func readBuild(info *debug.BuildInfo) build {
	b := build{Version: development, Go: info.GoVersion}
	module, modified := strings.CutSuffix(info.Main.Version, "+dirty")
	if m := untagged.FindStringSubmatch(module); m != nil {
		if t, err := time.Parse("20060102150405", m[1]); err == nil {
			b.Commit, b.Time = m[2], t.Format(time.RFC3339)
		}
	} else if strings.HasPrefix(module, "v") && !modified {
		b.Version = module
	}
	b.Modified = modified
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

// String returns one line for people.
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
	cmd := Output[build](&cobra.Command{
		Use:   "version",
		Short: "Print the version and the commit of this build",
		Args:  cobra.NoArgs,
	})
	Flags{JSONFlag(&asJSON)}.Add(cmd.Flags())
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
