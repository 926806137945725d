package dynamo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Publisher is the publisher of one rank's events.
type Publisher struct {
	ID       uint64
	Scope    string // NAMESPACE.COMPONENT.ENDPOINT, or the prefix that the worker registers
	Topic    string
	Endpoint string // of its ZeroMQ socket

	// Known reports whether Key and Indexer are set: workers before 1.6 do not register their rank.
	Known   bool
	Key     events.RankKey
	Indexer string // address of the rank's local indexer; empty without a usable indexer
	Card    Card   // of the worker of Key
}

// Topic is the topic of KV-cache events.
const Topic = "kv-events"

// gone is the age at which an untouched record counts as the record of an ended process. Dynamo itself uses 10 s, and
// touches its records every three seconds.
const gone = 30 * time.Second

// maxRecord bounds the bytes of a record.
const maxRecord = 1 << 20

type endpoint struct {
	Namespace string `json:"namespace"`
	Component string `json:"component"`
	Name      string `json:"name"`
}

type scope struct {
	endpoint
	Endpoint *endpoint `json:"endpoint"`
}

func (s *scope) String() string {
	of := &s.endpoint
	if s.Endpoint != nil {
		of = s.Endpoint
	}
	words := slices.DeleteFunc([]string{of.Namespace, of.Component, of.Name}, func(w string) bool { return w == "" })
	return strings.Join(words, ".")
}

// channel is a record of v1/event_channels.
type channel struct {
	Scope     scope  `json:"scope"`
	Namespace string `json:"namespace"` // with Component, instead of Scope in records of Dynamo up to 1.2
	Component string `json:"component"`
	Topic     string `json:"topic"`
	ID        uint64 `json:"instance_id"`
	Transport struct {
		Kind   string `json:"kind"`
		Config struct {
			Endpoint string `json:"endpoint"`
		} `json:"config"`
	} `json:"transport"`
}

// source is a record of v1/event_sources.
type source struct {
	ID       uint64 `json:"publisher_id"`
	Metadata struct {
		Worker *struct {
			ID   uint64 `json:"worker_id"`
			Rank uint32 `json:"dp_rank"`
		} `json:"worker"`
		Target *struct {
			Transport struct {
				TCP string `json:"tcp"`
			} `json:"transport"`
			Codec string `json:"request_plane_codec"`
		} `json:"recovery_target"`
	} `json:"metadata"`
}

// The kinds of records, as they appear in keys and folder names.
const channelsKind, sourcesKind, cardsKind = "event_channels", "event_sources", "mdc"

// record is a record of discovery.
type record struct {
	name string // for error messages
	text []byte
}

// Publishers returns the publishers of KV-cache events in a folder of file discovery, by id. It leaves out publishers
// of ended processes. wrong contains the errors of skipped records. A missing folder has no publishers.
func Publishers(folder string, now time.Time) (list []Publisher, wrong []error, err error) {
	sources, bad, err := records(folder, sourcesKind, now)
	if err != nil {
		return nil, nil, err
	}
	cards, worse, err := records(folder, cardsKind, now)
	if err != nil {
		return nil, nil, err
	}
	channels, more, err := records(folder, channelsKind, now)
	list, wrong = publishers(channels, sources, cards)
	return list, slices.Concat(bad, worse, more, wrong), err
}

// publishers decodes records. It skips unreadable records.
func publishers(channels, sources, models []record) (list []Publisher, wrong []error) {
	facts, wrong := cards(models)
	known := map[uint64]source{}
	for _, r := range sources {
		var s source
		if err := strictjson.Unmarshal(r.text, &s); err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", r.name, err))
			continue
		}
		known[s.ID] = s
	}
	for _, r := range channels {
		var c channel
		err := strictjson.Unmarshal(r.text, &c)
		switch {
		case err == nil && c.Topic != Topic:
			continue
		case err == nil && c.Transport.Kind != "Zmq":
			err = fmt.Errorf("its publisher is on %q, not on a ZeroMQ socket of its own", c.Transport.Kind)
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", r.name, err))
			continue
		}
		if c.Scope == (scope{}) {
			c.Scope.Namespace, c.Scope.Component = c.Namespace, c.Component
		}
		p := Publisher{ID: c.ID, Scope: c.Scope.String(), Topic: c.Topic, Endpoint: c.Transport.Config.Endpoint}
		if m := known[c.ID].Metadata; m.Worker != nil {
			p.Known = true
			p.Key = events.RankKey{Instance: events.WorkerID(strconv.FormatUint(m.Worker.ID, 10)),
				Rank: events.Rank(m.Worker.Rank)}
			p.Card = facts[m.Worker.ID]
			if m.Target != nil && m.Target.Codec == "msgpack" {
				p.Indexer = m.Target.Transport.TCP
			}
		}
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b Publisher) int { return strings.Compare(a.Endpoint, b.Endpoint) })
	return list, wrong
}

// records reads the records of one kind. It skips unreadable records.
func records(folder, kind string, now time.Time) (list []record, wrong []error, err error) {
	dir := filepath.Join(folder, "v1", kind)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.Mode().IsRegular() || strings.HasPrefix(e.Name(), ".") || now.Sub(info.ModTime()) > gone {
			continue // the file may have been deleted meanwhile
		}
		path := filepath.Join(dir, e.Name())
		if info.Size() > maxRecord {
			wrong = append(wrong, fmt.Errorf("%s has %d bytes, more than %d", path, info.Size(), maxRecord))
			continue
		}
		text, err := os.ReadFile(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			wrong = append(wrong, fmt.Errorf("%s: %w", path, err))
		default:
			list = append(list, record{path, text})
		}
	}
	return list, wrong, nil
}
