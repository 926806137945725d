package source

import (
	"fmt"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// subscribe receives the events of Dynamo's workers on a subject.
func (f *Source) subscribe() error {
	conn := f.ns.Conn()
	if len(f.EngineNATS.URLs) > 0 {
		c, err := f.connectEngine()
		if err != nil {
			return host.IgnoreEnd(f.ctx, err)
		}
		defer c.Close()
		conn = c
	}
	f.all.Go(func() error {
		f.relayLoads(conn)
		return nil
	})
	listen := func(subject string) error {
		return conn.Listen(f.ctx, subject, func(data []byte) {
			// an envelope holds several events, and a digest covers the content of a single event
			err := events.ReadRouterEnvelope(data, func(e events.RouterEvent) {
				f.deliver(e, events.PayloadDigest(f.eventLine(&e)))
			})
			if err != nil {
				f.bad.WarnTo(f.log, "a message without router events of Dynamo's is skipped", "subject", subject,
					"error", err)
			}
		})
	}
	if subject := ofEndpoints(f.Engine); subject != "" {
		f.all.Go(func() error {
			if err := listen(subject); f.ctx.Err() == nil {
				f.log.Warn("cannot subscribe to the events of the component's endpoints", "subject", subject, "error", err,
					"what_to_do", "let this user subscribe to the subject, on which Dynamo publishes since 1.0")
			}
			return nil
		})
	}
	return host.IgnoreEnd(f.ctx, listen(f.Engine))
}

// ofEndpoints returns the subject for the events of all endpoints of a component, which Dynamo uses since 1.0. subject
// is the subject of the component, which earlier releases use. The result is empty for other subjects.
func ofEndpoints(subject string) string {
	base, old := strings.CutSuffix(subject, ".kv-events")
	namespace, component, found := strings.Cut(base, ".component.")
	if !old || !found || !strings.HasPrefix(namespace, "namespace.") || strings.Contains(component, ".") {
		return ""
	}
	return base + ".endpoint.*.kv-events"
}

// engineNATSAdvice is the remedy for a missing connection to --engine-nats.
const engineNATSAdvice = "check the NATS server of the Dynamo fleet, and its address in --engine-nats; the shim dials until the " +
	"server answers"

// connectEngine waits for a connection to --engine-nats.
func (f *Source) connectEngine() (*jetstream.Conn, error) {
	options := f.EngineNATS
	waiting := host.Limiter{Every: f.LogRepeat}
	options.Core, options.Wait = true, true
	options.Disconnected = func(err error) {
		f.watch.unreached("--engine-nats", err, engineNATSAdvice)
		f.log.Warn("the connection to --engine-nats is lost; events of the meantime will be missing", "error",
			err, "what_to_do", engineNATSAdvice)
	}
	options.Reconnected = func(url string) {
		f.watch.reached("--engine-nats")
		f.log.Info("the connection to --engine-nats is back", "server", url)
	}
	options.AsyncError = func(err error) { f.log.Error("--engine-nats", "error", err) }
	options.Waiting = func(err error) {
		f.watch.unreached("--engine-nats", err, engineNATSAdvice)
		waiting.WarnTo(f.log, "waiting for --engine-nats", "nats",
			natsurl.Shown(strings.Join(options.URLs, ",")), "error", err, "what_to_do", engineNATSAdvice)
	}
	c, err := jetstream.Connect(f.ctx, options)
	if err != nil {
		return nil, fmt.Errorf("--engine-nats: %w", err)
	}
	f.watch.reached("--engine-nats")
	f.log.Info("connected to --engine-nats", "server", c.ServerURL())
	return c, nil
}
