// Command fetch puts the components of the judges into the user's cache folder, unless present: Python environments,
// wheels and files of source archives that are read without installation, the libraries of Mooncake's programs,
// Debian's Prometheus, a program with Helm's library, and Dynamo's worker selector, built with cargo. All components
// except Prometheus are pinned, and none is installed on the machine. Only Chromium, tmux and systemd-analyze are
// installed: if missing, apt-get installs Debian's packages, which needs root. `make judges` runs the command before
// the tests.
//
//	go run ./integration/judges/fetch
package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// environments are the requirements files of integration/python for the judges.
var environments = []string{"requirements.txt", "engines.txt", "dynamo.txt", "dynamo-next.txt", "dynamo-mocker.txt",
	"kubernetes.txt",
	"mooncake.txt", "python-client.txt", "python-adapters.txt", "envoy.txt", "tokenizers.txt", "grpc.txt",
	"openapi.txt", "sbom.txt", "agents.txt", "release.txt"}

func main() {
	if err := fetch(os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "fetch:", err)
		os.Exit(1)
	}
}

func fetch(progress io.Writer) error {
	step := func(what string, do func() error) error {
		begun := time.Now()
		fmt.Fprintf(progress, "%s …\n", what)
		if err := do(); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		fmt.Fprintf(progress, "%s: ready after %v\n", what, time.Since(begun).Round(100*time.Millisecond))
		return nil
	}
	for _, name := range environments {
		err := step("environment "+name, func() error {
			_, err := pyenv.FetchEnvironment(progress, name)
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := step("wheels of wheels.txt", func() error { return pyenv.FetchWheels(progress) }); err != nil {
		return err
	}
	if err := step("files of sources.txt", func() error { return pyenv.FetchSources(progress) }); err != nil {
		return err
	}
	err := step("vocabularies of vocabularies.txt", func() error { return pyenv.FetchVocabularies(progress) })
	if err != nil {
		return err
	}
	if err := step("Mooncake's libraries", func() error { return pyenv.FetchLibraries(progress) }); err != nil {
		return err
	}
	if err := step("Prometheus", func() error { return pyenv.FetchPrometheus(progress) }); err != nil {
		return err
	}
	if err := step("etcd", func() error { return pyenv.FetchEtcd(progress) }); err != nil {
		return err
	}
	for _, name := range []string{"chromium", "tmux"} {
		if err := step(name, func() error { return install(progress, name, name) }); err != nil {
			return err
		}
	}
	err = step("systemd-analyze", func() error { return install(progress, "systemd-analyze", "systemd") })
	if err != nil {
		return err
	}
	err = step("Helm's library (some minutes at first)", func() error {
		cmd := exec.Command("go", "test", "-C", "integration/judges/helm", "-c", "-o", os.DevNull, ".")
		cmd.Stdout, cmd.Stderr = progress, progress
		return cmd.Run()
	})
	if err != nil {
		return err
	}
	return step("Dynamo's worker selector (a minute or two at first)", func() error {
		return pyenv.FetchProgram(progress, "integration/judges/routing/judge")
	})
}

// install installs a Debian package unless the named program exists.
func install(progress io.Writer, name, pkg string) error {
	if _, err := exec.LookPath(name); err == nil {
		return nil
	}
	for _, args := range [][]string{{"update"}, {"install", "-y", "--no-install-recommends", pkg}} {
		c := exec.Command("apt-get", args...)
		c.Stdout, c.Stderr = progress, progress
		if err := c.Run(); err != nil {
			return fmt.Errorf("apt-get %s (install %s yourself if this is not Debian, or you are not root): %w",
				args[0], pkg, err)
		}
	}
	return nil
}
