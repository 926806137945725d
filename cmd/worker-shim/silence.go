package main

import (
	"os"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// silenceEvery is how often a source that has not spoken is reported to the nodes, which forget it after a while.
const silenceEvery = api.QuietSourceLife / 3

// watchSilence reports a source of many ranks that has published no event for --silence since the start: in the log
// once, and to the nodes until it publishes one. Such a source has no rank yet whose record could say so.
func (f *fleet) watchSilence() {
	quiet := time.NewTimer(f.cfg.silence)
	defer quiet.Stop()
	select {
	case <-quiet.C:
	case <-f.spoke:
		return
	case <-f.ctx.Done():
		return
	}
	do := f.silenceAdvice()
	f.log.Warn("the source has published no event since the start", "source", f.cfg.source, "engine", f.cfg.engine, "for",
		f.cfg.silence, "what_to_do", do)
	host, _ := os.Hostname()
	source := api.QuietSource{Source: f.cfg.source, Engine: jetstream.ShownAddress(f.cfg.engine), Model: f.cfg.model,
		Host: host, PID: os.Getpid(), Advice: do}
	again := time.NewTicker(silenceEvery)
	defer again.Stop()
	for {
		f.reportSource(source)
		select {
		case <-again.C:
		case <-f.spoke:
			f.log.Info("the source has published its first event", "source", f.cfg.source, "engine", f.cfg.engine)
			source.Spoke = true
			f.reportSource(source)
			return
		case <-f.ctx.Done():
			return
		}
	}
}

// reportSource publishes to the nodes that a source has not spoken, or that it has.
func (f *fleet) reportSource(source api.QuietSource) {
	subject, err := jetstream.EngineSubject(f.ns.Name(), f.named(events.RankKey{}).Instance)
	var body []byte
	if err == nil {
		body, err = api.Marshal(api.MsgPack, &api.SourceReport{Sources: []api.QuietSource{source}})
	}
	if err == nil {
		err = f.ns.Conn().Send(subject, api.MsgPack, body)
	}
	if err != nil {
		f.bad.warn(f.log, "the silence of the source could not be reported to the nodes", "error", err, "what_to_do",
			"see that NATS answers, and that this user may publish for workers (indexer auth example)")
	}
}

// silenceAdvice is what may be wrong with a source that has published nothing.
func (f *fleet) silenceAdvice() string {
	const idle = "or send the fleet a request: workers without requests publish nothing"
	switch f.cfg.source {
	case sourceDynamo:
		return "see that --engine is the subject on which Dynamo's workers publish: " +
			"namespace.N.component.C.endpoint.E.kv-events since 1.0, namespace.N.component.C.kv-events before; that their " +
			"event plane is NATS (DYN_EVENT_PLANE=nats), on the server of --engine-nats; " + idle
	case sourcePlane:
		return "see that --engine is the discovery of Dynamo's workers, that their event plane is ZeroMQ, and that --topic " +
			"begins their NAMESPACE.COMPONENT.ENDPOINT; " + idle
	}
	return "see that a program writes router events, one a line, to --engine; " + idle
}
