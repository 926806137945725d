package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// place is a version in a file of the repository.
type place struct {
	file string
	line *regexp.Regexp              // its only group is the version
	form func(version string) string // of v0.5.0
}

// places lists all copies of the version. `go generate ./tools/release` writes cli.Release into them. Packages get the
// version of their build.
var places = []place{
	{chartFolder + "/Chart.yaml", regexp.MustCompile(`(?m)^version: (\S+)$`), semantic},
	{chartFolder + "/Chart.yaml", regexp.MustCompile(`(?m)^appVersion: (\S+)$`), asTag},
	{pythonFolder + "/pyproject.toml", regexp.MustCompile(`(?m)^version = "(\S+)"$`), asPython},
	{"docs/cluster.md", regexp.MustCompile(`\b(v\d+\.\d+\.\d+\S*)`), asTag},
	{"docs/install.md", regexp.MustCompile(`\bkvatlas[_-](\d+\.\d+\.\d+)`), semantic},
	{"docs/install.md", regexp.MustCompile(`\bkvatlas\[\S*\]==([\w.+]+)`), asPython},
	{"docs/install.md", regexp.MustCompile(`@(v\d+\.\d+\.\d+)`), asTag},
}

func asTag(version string) string { return version }

// semantic returns a semantic version, as charts and images need.
func semantic(version string) string { return strings.TrimPrefix(version, "v") }

var (
	developed = regexp.MustCompile(`^(\d+\.\d+\.\d+)-dev(?:-([0-9a-f]+))?(-modified)?$`)
	candidate = regexp.MustCompile(`^(\d+\.\d+\.\d+)-(a|b|rc)\.?(\d+)$`)
)

// asPython returns a version by PEP 440: 0.5.0, 0.5.0rc1, 0.6.0.dev0+0123456789ab.
func asPython(version string) string {
	version = semantic(version)
	if m := candidate.FindStringSubmatch(version); m != nil {
		return m[1] + m[2] + m[3]
	}
	m := developed.FindStringSubmatch(version)
	if m == nil {
		return version
	}
	local := strings.Trim(m[2]+strings.ReplaceAll(m[3], "-", "."), ".")
	if local != "" {
		local = "+" + local
	}
	return m[1] + ".dev0" + local
}

// stamped returns the text of a file with another version in all of its places.
func stamped(file, text, version string) (string, error) {
	for _, p := range places {
		if p.file != file {
			continue
		}
		if !p.line.MatchString(text) {
			return "", fmt.Errorf("%s has no version like %s", file, p.line)
		}
		text = p.line.ReplaceAllStringFunc(text, func(line string) string {
			at := p.line.FindStringSubmatchIndex(line)
			return line[:at[2]] + p.form(version) + line[at[3]:]
		})
	}
	return text, nil
}

// writeVersions writes a version into all places below a folder.
func writeVersions(root, version string) error {
	for _, p := range places {
		path := filepath.Join(root, p.file)
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		with, err := stamped(p.file, string(text), version)
		if err != nil {
			return err
		}
		if with == string(text) {
			continue
		}
		if err := os.WriteFile(path, []byte(with), 0o644); err != nil {
			return err
		}
	}
	return nil
}
