package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/tools/child"
)

// indexer is the indexer's process and its restarts, with the same data and port.
type indexer struct {
	program string
	data    string
	addr    string
	log     string
	more    []string // arguments
	cmd     *exec.Cmd
	done    chan struct{} // closed when cmd has ended
}

func newIndexer(program, dir string) (*indexer, error) {
	// Both processes use the same port. The port is below the system's range, so no other process gets the port between
	// the two.
	var l net.Listener
	err := errors.New("no port was tried")
	for try := 0; try < 100 && err != nil; try++ {
		l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(20000)))
	}
	if err != nil {
		return nil, err
	}
	defer l.Close()
	return &indexer{program: program, data: filepath.Join(dir, "data"), addr: l.Addr().String(),
		log: filepath.Join(dir, "indexer.log")}, nil
}

func (x *indexer) url() string { return "nats://" + x.addr }

// start starts a process without waiting for readiness.
func (x *indexer) start(context.Context) error {
	log, err := os.OpenFile(x.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(x.program, "serve", "--data", x.data, "--nats-listen", x.addr, "--http-listen", "",
		"--log-level", "warn", "--guess-policy", "off") // the workers announce all blocks
	cmd.Args = append(cmd.Args, x.more...)
	cmd.Env = os.Environ()
	for _, name := range []string{"NATS_URL", "KVATLAS_NATS", "KVATLAS_CONFIG", "KVATLAS_NAMESPACE"} {
		cmd.Env = append(cmd.Env, name+"=")
	}
	cmd.Stderr = log
	cmd.SysProcAttr = child.DiesWithUs()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the indexer: %w", err)
	}
	x.cmd, x.done = cmd, make(chan struct{})
	go func(done chan struct{}) {
		cmd.Wait()
		close(done)
	}(x.done)
	return nil
}

// ended returns the reason of the process's end, or nil while the process runs.
func (x *indexer) ended() error {
	select {
	case <-x.done:
		said, _ := os.ReadFile(x.log)
		said = bytes.TrimSpace(said)
		return fmt.Errorf("%w: %s: %s", errEnded, x.cmd.ProcessState, said[max(0, len(said)-2000):])
	default:
		return nil
	}
}

// kill ends the process as a crash would.
func (x *indexer) kill() error {
	if err := x.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill the indexer: %w", err)
	}
	<-x.done
	return nil
}

// stop ends the process in good order, or after a while in any.
func (x *indexer) stop() {
	if x.cmd == nil {
		return
	}
	x.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-x.done:
	case <-time.After(15 * time.Second):
		x.cmd.Process.Kill()
		<-x.done
	}
}
