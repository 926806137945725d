// Command vulncheck looks for known vulnerabilities in the called code of the programs. It runs govulncheck, pinned by
// go.mod, with the Go vulnerability database.
//
//	go run ./tools/vulncheck [--db https://vuln.go.dev] [PACKAGE...]
//
// It uses the first reachable source:
//
//  1. The database.
//  2. The source of the database, the module golang.org/x/vulndb on the Go module proxy. The module may be some weeks
//     older. The download needs up to 100 MB of the module cache.
//
// Without a reachable source, it prints NOT CHECKED with both reasons and exits with status 0, because an outage of the
// network is not a fault of a commit. Every other failure exits with status 1. A vulnerability exits with status 3.
//
// The standard library is checked in the version of go.mod's toolchain line, which `make release` uses. Programs from
// an older Go have more vulnerabilities; vulncheck then prints a warning.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	statusFailed     = 1
	statusVulnerable = 3 // of govulncheck too
)

func main() {
	db := flag.String("db", "https://vuln.go.dev", "URL of the database, or file:///FOLDER")
	flag.Parse()
	patterns := flag.Args()
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	c := check{db: *db, source: download, out: os.Stdout, patterns: patterns}
	os.Exit(c.run(context.Background()))
}

// check is a run of vulncheck.
type check struct {
	db       string // URL
	source   source // fallback for an unreachable database
	dir      string // of the module to check; "" is the current folder
	patterns []string
	out      io.Writer
}

// source returns a folder with a file for every advisory, and the version.
type source func(context.Context) (folder, version string, failed error)

// run returns the exit status.
func (c *check) run(ctx context.Context) int {
	db, failed := c.db, reach(ctx, c.db)
	if errors.As(failed, new(unreachable)) {
		folder, version, err := c.source(ctx)
		if err != nil {
			fmt.Fprintf(c.out, "vulncheck: NOT CHECKED. The vulnerability database cannot be reached: %v.\n"+
				"The copy on the Go module proxy is not available either: %v.\n"+
				"Run `make vulncheck` with access to one of the two.\n", failed, err)
			return 0
		}
		fmt.Fprintf(c.out, "vulncheck: the database cannot be reached (%v), golang.org/x/vulndb %s is used\n", failed,
			version)
		db, failed = "file://"+filepath.ToSlash(folder), nil
	}
	if failed != nil {
		fmt.Fprintf(c.out, "vulncheck: the vulnerability database cannot be used: %v\n", failed)
		return statusFailed
	}
	toolchain := c.toolchain(ctx)
	args := []string{"tool", "govulncheck", "-db", db}
	if c.dir != "" {
		args = append(args, "-C", c.dir)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, c.patterns...)...)
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN="+toolchain)
	var said bytes.Buffer
	cmd.Stdout = io.MultiWriter(c.out, &said)
	cmd.Stderr = cmd.Stdout
	err := cmd.Run()
	if exit, is := errors.AsType[*exec.ExitError](err); is && exit.ExitCode() == statusVulnerable {
		return statusVulnerable
	}
	if err != nil {
		fmt.Fprintf(c.out, "vulncheck: %v\n", err)
		return statusFailed
	}
	// A panic of govulncheck 1.9.0 may exit with status 0, because Wait can return before the panic ends the process.
	if !strings.Contains(said.String(), "No vulnerabilities found.\n") &&
		!strings.Contains(said.String(), "Your code is affected by 0 vulnerabilities") {
		fmt.Fprintln(c.out, "vulncheck: govulncheck ended with status 0 before its summary")
		return statusFailed
	}
	return 0
}

// unreachable is the error of a database without an answer, or with an answer of a proxy.
type unreachable struct{ error }

func (u unreachable) Unwrap() error { return u.error }

// reach returns nil if the database answers, and an [unreachable] error if the network does not reach the database.
func reach(ctx context.Context, db string) error {
	if strings.HasPrefix(db, "file:") {
		return nil // govulncheck reports a missing folder
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(db, "/")+"/index/db.json.gz", nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(r)
	if refused, is := errors.AsType[*url.Error](err); is {
		return unreachable{refused}
	}
	if err != nil {
		return err
	}
	defer res.Body.Close()
	switch s := res.StatusCode; {
	case s == http.StatusOK:
		return nil
	case s == http.StatusForbidden, s == http.StatusProxyAuthRequired, s == http.StatusTooManyRequests, s >= 500:
		return unreachable{fmt.Errorf("GET %s: %s", r.URL, res.Status)}
	default:
		return fmt.Errorf("GET %s: %s; is --db right?", r.URL, res.Status)
	}
}

// download downloads the database's source from the Go module proxy and returns the folder of the advisories.
func download(ctx context.Context) (folder, version string, failed error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", "golang.org/x/vulndb@latest")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	var m struct{ Dir, Version, Error string }
	if len(out) > 0 {
		if err := json.Unmarshal(out, &m); err != nil {
			return "", "", fmt.Errorf("%s: %w", cmd, err)
		}
	}
	if err != nil || m.Error != "" {
		return "", "", fmt.Errorf("%s: %s%s", cmd, m.Error, strings.TrimSpace(errs.String()))
	}
	folder = filepath.Join(m.Dir, "data", "osv")
	if advisories, err := filepath.Glob(filepath.Join(folder, "GO-*.json")); err != nil || len(advisories) == 0 {
		return "", "", fmt.Errorf("golang.org/x/vulndb %s has no advisories in data/osv", m.Version)
	}
	return folder, m.Version, nil
}

// toolchain returns the GOTOOLCHAIN for the check: go.mod's toolchain line if available. It prints a warning if `go` on
// this machine is a different version.
func (c *check) toolchain(ctx context.Context) string {
	version := func(toolchain string) (string, error) {
		cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION")
		cmd.Dir, cmd.Env = c.dir, append(os.Environ(), "GOTOOLCHAIN="+toolchain)
		out, err := cmd.CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	local, err := version("local")
	if err != nil {
		return "local" // govulncheck fails in the same way, with the reason
	}
	named, err := version("auto")
	switch {
	case err != nil:
		fmt.Fprintf(c.out, "vulncheck: checking %s, because the Go version of go.mod is not available: %s\n", local, named)
		return "local"
	case named != local:
		fmt.Fprintf(c.out, "vulncheck: checking %s of go.mod. This machine has %s: build programs for "+
			"distribution with GOTOOLCHAIN=auto, as make release does.\n", named, local)
	}
	return "auto"
}
