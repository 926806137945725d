package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// The size of the messages of publisher.py.
const (
	blockSize = 16
	message   = 64 // blocks
	chain     = 12 // messages
)

const patience = 2 * time.Minute

// result is the result of a run.
type result struct {
	perSecond               float64 // blocks, from the first message until the last block is found
	sending                 float64 // seconds until the engines had handed over all messages
	engines, shims, indexer float64 // processor time, µs per block
}

// bench has the parts of all runs.
type bench struct {
	indexer, shim, dynamo string // programs; dynamo is a Python
	dir                   string // for data
	engines               *engines
}

// build makes the programs and starts the engines.
func build(ctx context.Context, f flags) (*bench, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	root := strings.TrimSpace(string(out))
	b := &bench{dir: f.cache, indexer: filepath.Join(f.cache, "bin", "indexer"),
		shim: filepath.Join(f.cache, "bin", "worker-shim")}
	fmt.Fprintln(os.Stderr, "building, and installing missing parts …")
	if out, err := exec.CommandContext(ctx, "go", "build", "-C", root, "-trimpath", "-o", filepath.Dir(b.indexer)+"/",
		"./cmd/indexer", "./cmd/worker-shim").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go build: %w: %s", err, out)
	}
	if b.dynamo, err = pyenv.FetchEnvironment(os.Stderr, "dynamo.txt"); err != nil {
		return nil, err
	}
	python, err := pyenv.FetchEnvironment(os.Stderr, "requirements.txt")
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(os.Stderr, "encoding the messages …")
	b.engines, err = startEngines(python, filepath.Join(root, "tools", "path", "publisher.py"), f)
	return b, err
}

// engines is a running publisher.py.
type engines struct {
	cmd    *exec.Cmd
	in     io.Writer
	out    *bufio.Reader
	blocks int
}

func startEngines(python, script string, f flags) (*engines, error) {
	e := &engines{cmd: exec.Command(python, script, fmt.Sprintf(`{"workers":%d,"blocks":%d}`, f.workers, f.blocks))}
	e.cmd.Stderr = os.Stderr
	in, err := e.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := e.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	e.in, e.out = in, bufio.NewReader(out)
	if err := e.cmd.Start(); err != nil {
		return nil, err
	}
	return e, e.answer(nil)
}

func (e *engines) stop() {
	_ = e.cmd.Process.Kill() // an ended process needs no kill; the exit status does not matter
	_ = e.cmd.Wait()
}

// do sends a command and decodes the reply.
func (e *engines) do(op string, into any) error {
	if _, err := fmt.Fprintf(e.in, "{\"op\":%q}\n", op); err != nil {
		return fmt.Errorf("the engines do not listen: %w", err)
	}
	return e.answer(into)
}

func (e *engines) answer(into any) error {
	guard := time.AfterFunc(patience, func() { e.cmd.Process.Kill() })
	defer guard.Stop()
	line, err := e.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("no reply from the engines: %w", err)
	}
	var verdict struct {
		OK    bool
		Error string
	}
	if err := json.Unmarshal(line, &verdict); err != nil || !verdict.OK {
		return fmt.Errorf("the engines: %w: %.200s", err, line)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(line, into)
}

// load describes the messages of the engines.
type load struct {
	Engines []struct{ Endpoint, Replay string }
	Last    [][]uint32
	Samples []struct {
		Worker int
		Tokens []uint32
	}
	Blocks int
}

// process is a running program with its output.
type process struct {
	cmd  *exec.Cmd
	said bytes.Buffer
}

func start(program string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(program, args...)}
	p.cmd.Stdout, p.cmd.Stderr = &p.said, &p.said
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "NATS_") && !strings.HasPrefix(v, "KVATLAS_") {
			p.cmd.Env = append(p.cmd.Env, v)
		}
	}
	return p, p.cmd.Start()
}

// cpu returns the processor time of a running process (proc(5), /proc/PID/stat, in hundredths of a second).
func (p *process) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	if err1 != nil || err2 != nil {
		return 0, fmt.Errorf("/proc/%d/stat: %q", p.cmd.Process.Pid, text)
	}
	return time.Duration(user+system) * 10 * time.Millisecond, nil
}

// stop ends a process in good order, or else at once.
func (p *process) stop() {
	guard := time.AfterFunc(30*time.Second, func() { p.cmd.Process.Kill() })
	defer guard.Stop()
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // an ended process ignores the signal
	_ = p.cmd.Wait()                          // the exit status of Dynamo's indexer does not matter
}

// measure runs a contender once.
func (b *bench) measure(ctx context.Context, c contender) (r result, err error) {
	var l load
	if err := b.engines.do("open", &l); err != nil {
		return r, err
	}
	b.engines.blocks = l.Blocks
	var indexer *process
	var shims []*process
	dir, err := os.MkdirTemp(b.dir, "path-")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	defer func() { // before the folder goes
		for _, p := range append(shims, indexer) {
			if p == nil {
				continue
			}
			p.stop()
			if err != nil || os.Getenv("SAY") != "" {
				fmt.Fprintf(os.Stderr, "output of %s:\n%s\n", p.cmd, &p.said)
			}
		}
	}()
	base, err := free()
	if err != nil {
		return r, err
	}
	if c.peer {
		indexer, err = b.startDynamo(ctx, base, &l)
	} else {
		indexer, shims, err = b.startOurs(ctx, c, dir, base, &l)
	}
	if err != nil {
		return r, err
	}
	if err := b.engines.do("subscribers", nil); err != nil {
		return r, err
	}
	before, err := spent(append(shims, indexer)...)
	if err != nil {
		return r, err
	}
	var sent struct {
		Began   int64
		Sending float64 `json:"sending_s"`
		CPU     float64 `json:"cpu_s"`
	}
	if err := b.engines.do("send", &sent); err != nil {
		return r, err
	}
	for i, tokens := range l.Last {
		if err := await(ctx, base, i, tokens); err != nil {
			return r, err
		}
	}
	took := time.Since(time.Unix(0, sent.Began))
	after, err := spent(append(shims, indexer)...)
	if err != nil {
		return r, err
	}
	for _, s := range l.Samples {
		if got, err := depth(ctx, base, s.Worker, s.Tokens); err != nil || got != len(s.Tokens) {
			return r, fmt.Errorf("of a prompt of %d tokens %d are found: %w", len(s.Tokens), got, err)
		}
	}
	blocks := float64(l.Blocks)
	r = result{perSecond: blocks / took.Seconds(), sending: sent.Sending, engines: sent.CPU * 1e6 / blocks}
	for i := range after {
		us := float64((after[i] - before[i]).Microseconds()) / blocks
		if i < len(shims) {
			r.shims += us
		} else {
			r.indexer += us
		}
	}
	return r, nil
}

// startDynamo starts Dynamo's indexer at an address and registers the engines. The process may run after an error.
func (b *bench) startDynamo(ctx context.Context, base string, l *load) (indexer *process, err error) {
	if indexer, err = start(b.dynamo, "-m", "dynamo.indexer", "--port", base[strings.LastIndexByte(base, ':')+1:],
		"--threads", "2"); err != nil {
		return indexer, err
	}
	if err := reach(ctx, base, "/health"); err != nil {
		return indexer, err
	}
	for i, e := range l.Engines {
		body := fmt.Sprintf(
			`{"instance_id":%d,"endpoint":%q,"replay_endpoint":%q,"model_name":"m","block_size":%d}`, i, e.Endpoint,
			e.Replay, blockSize)
		if _, err := call(ctx, base, "/register", []byte(body)); err != nil {
			return indexer, err
		}
	}
	return indexer, nil
}

// startOurs starts an indexer at an address, with a NATS server, and the shims. Processes may run after an error.
func (b *bench) startOurs(
	ctx context.Context, c contender, dir, base string, l *load,
) (indexer *process, shims []*process, err error) {
	nats, err := free()
	if err != nil {
		return nil, nil, err
	}
	if indexer, err = start(b.indexer, "serve", "--data", dir, "--nats-listen", nats, "--http-listen", base,
		"--sync-interval", c.syncs.String()); err != nil {
		return indexer, shims, err
	}
	if err := reach(ctx, base, "/readyz"); err != nil {
		return indexer, shims, err
	}
	for i, e := range l.Engines {
		p, err := start(b.shim, "run", "--engine", e.Endpoint, "--replay", e.Replay, "--worker", strconv.Itoa(i),
			"--model", "m",
			"--block-size", strconv.Itoa(blockSize), "--nats", nats)
		if err != nil {
			return indexer, shims, err
		}
		shims = append(shims, p)
	}
	return indexer, shims, nil
}

// spent returns the processor times of processes.
func spent(ps ...*process) (all []time.Duration, err error) {
	for _, p := range ps {
		d, err := p.cpu()
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// free returns an unused loopback address.
func free() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// reach waits until a service is healthy.
func reach(ctx context.Context, base, path string) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		_, err := call(ctx, base, path, nil)
		if err == nil || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
	}
}

// await waits until the index has a worker's block of tokens. Queries are rare to leave the processor to the
// contenders.
func await(ctx context.Context, base string, worker int, tokens []uint32) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		got, err := depth(ctx, base, worker, tokens)
		switch {
		case err == nil && got == len(tokens):
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(deadline):
			return fmt.Errorf("the last block of engine %d does not arrive: %w", worker, err)
		}
	}
}

// depth returns the number of prompt tokens on a worker's device, from a query.
func depth(ctx context.Context, base string, worker int, tokens []uint32) (int, error) {
	body, err := json.Marshal(map[string]any{"model_name": "m", "token_ids": tokens})
	if err != nil {
		return 0, err
	}
	text, err := call(ctx, base, "/query", body)
	if err != nil {
		return 0, err
	}
	var answer struct{ Instances map[string]struct{ GPU int } }
	err = json.Unmarshal(text, &answer)
	return answer.Instances[strconv.Itoa(worker)].GPU, err
}

// call makes a request, with a JSON body or none.
func call(ctx context.Context, base, path string, body []byte) ([]byte, error) {
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	reply, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	if err == nil && reply.StatusCode >= 300 {
		err = fmt.Errorf("%s: %s: %.200s", path, reply.Status, text)
	}
	return text, err
}
