// Command vulncheck looks for known vulnerabilities in the code that the programs call. It runs govulncheck, which
// go.mod pins, with the Go vulnerability database.
//
//	go run ./tools/vulncheck [--db https://vuln.go.dev] [PACKAGE...]
//
// It uses the first of these sources that it can reach:
//
//  1. The database itself.
//  2. Its source, the module golang.org/x/vulndb on the Go module proxy. It is up to some weeks older. The download
//     takes up to 100 MB of the module cache.
//
// If it can reach neither, it prints NOT CHECKED with both reasons, and ends with status 0: a network that is away is
// no fault of a commit. Every other failure ends with status 1. A vulnerability ends with status 3.
//
// The standard library is checked as in the Go that go.mod's toolchain line names, which `make release` uses. Programs
// built with an older Go have more vulnerabilities; vulncheck then prints a warning.
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

// check is one run of vulncheck.
type check struct {
	db       string // URL
	source   source // of the database, if that cannot be reached
	dir      string // of the module to check; "" is the current folder
	patterns []string
	out      io.Writer
}

// source returns a folder of advisories, one a file, and its version.
type source func(context.Context) (folder, version string, failed error)

// run returns the exit status.
func (c *check) run(ctx context.Context) int {
	db, failed := c.db, reach(ctx, c.db)
	if errors.As(failed, new(unreachable)) {
		folder, version, err := c.source(ctx)
		if err != nil {
			fmt.Fprintf(c.out, "vulncheck: NOT CHECKED. The vulnerability database cannot be reached: %v.\n"+
				"Its copy on the Go module proxy cannot be used either: %v.\n"+
				"Run `make vulncheck` where one of them can be reached.\n", failed, err)
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
	// A panic of govulncheck 1.9.0 may end with status 0: its Wait can return before the panic ends the process.
	if !strings.Contains(said.String(), "No vulnerabilities found.\n") &&
		!strings.Contains(said.String(), "Your code is affected by 0 vulnerabilities") {
		fmt.Fprintln(c.out, "vulncheck: govulncheck ended with status 0 before its summary")
		return statusFailed
	}
	return 0
}

// unreachable is the error of a database that gives no answer, or whose answer is that of a proxy before it.
type unreachable struct{ error }

func (u unreachable) Unwrap() error { return u.error }

// reach returns nil if the database answers, and an [unreachable] error if the network does not reach it.
func reach(ctx context.Context, db string) error {
	if strings.HasPrefix(db, "file:") {
		return nil // govulncheck reports one that is not there
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

// download fetches the database's source from the Go module proxy, and returns the folder of its advisories.
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

// toolchain returns the GOTOOLCHAIN with which to check: that of go.mod's toolchain line if it can be had. It prints a
// warning if it is not what `go` is on this machine.
func (c *check) toolchain(ctx context.Context) string {
	version := func(toolchain string) (string, error) {
		cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION")
		cmd.Dir, cmd.Env = c.dir, append(os.Environ(), "GOTOOLCHAIN="+toolchain)
		out, err := cmd.CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	local, err := version("local")
	if err != nil {
		return "local" // govulncheck fails in the same way, and says why
	}
	named, err := version("auto")
	switch {
	case err != nil:
		fmt.Fprintf(c.out, "vulncheck: %s is checked, as the Go that go.mod names cannot be had: %s\n", local, named)
		return "local"
	case named != local:
		fmt.Fprintf(c.out, "vulncheck: %s is checked, which go.mod names. This machine has %s: build programs for "+
			"others with GOTOOLCHAIN=auto, as make release does.\n", named, local)
	}
	return "auto"
}
