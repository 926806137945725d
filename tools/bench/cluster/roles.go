package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// RunRole runs a process beside the nodes until the end of ctx: "nats", "echo" or "relay0" to "relay2".
func RunRole(ctx context.Context, role, data, config, url string, say io.Writer) error {
	switch role {
	case "nats":
		server, err := natsserver.Start(ctx, natsserver.Options{Dir: data, Listen: "127.0.0.1:0",
			ConfigFile: config, SyncInterval: 2 * time.Minute})
		if err != nil {
			return err
		}
		defer server.Stop()
		fmt.Fprintf(say, "listen=%s\n", server.Addr())
		<-ctx.Done()
		return nil
	case "echo", "relay0", "relay1", "relay2":
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{url}, Core: true})
		if err != nil {
			return err
		}
		defer conn.Close()
		zeros := make([]byte, 1<<20)
		endpoints := []jetstream.Endpoint{{Name: "echo", Subject: echoAt, Handler: func(_ context.Context,
			r jetstream.Request) jetstream.Response {
			n := 0
			if len(r.Body) >= 4 {
				n = int(min(binary.LittleEndian.Uint32(r.Body), uint32(len(zeros)/2)))
			}
			return jetstream.Response{ContentType: api.MsgPack, Body: zeros[:n]}
		}}}
		if own, is := strings.CutPrefix(role, "relay"); is {
			endpoints[0].Subject = relayAt + "." + own
			endpoints = append(endpoints, jetstream.Endpoint{Name: "relay", Subject: relayAt, QueueGroup: "relays",
				Handler: relay(conn, own, say)})
		}
		service, err := jetstream.Serve(conn, jetstream.ServiceConfig{Name: role, Version: "0.0.0", Workers: 128,
			Endpoints: endpoints})
		if err != nil {
			return err
		}
		if err := conn.NATS().Flush(); err != nil { // after the flush the server has the subscriptions
			return err
		}
		fmt.Fprintln(say, "ready")
		<-ctx.Done()
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		service.Stop(stopping)
		return nil
	}
	return fmt.Errorf("role %q is none of nats, echo and relay0 to relay2", role)
}

// relay replies with the replies of the two other relays, requested in sequence.
func relay(conn *jetstream.Conn, own string, say io.Writer) jetstream.Handler {
	var others []string
	for i := range relays {
		if name := strconv.Itoa(i); name != own {
			others = append(others, relayAt+"."+name)
		}
	}
	var turn atomic.Uint32
	return func(ctx context.Context, r jetstream.Request) jetstream.Response {
		reply, err := conn.Request(ctx, others[int(turn.Add(1))%len(others)], api.MsgPack, r.Body)
		if err != nil {
			fmt.Fprintln(say, err)
			return jetstream.Response{}
		}
		return jetstream.Response{ContentType: api.MsgPack, Body: reply.Body}
	}
}

// echo starts a process that answers bare requests: "echo" or a relay.
func (b *bed) echo(role string) (*process, error) {
	p, err := b.start("bench", "cluster", "--role", role, "--url", b.echoURL())
	if err != nil {
		return nil, err
	}
	if _, err := p.wait(b.ctx, `ready`); err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}
