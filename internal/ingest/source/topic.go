package source

import (
	"errors"
	"math"
	"net"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// topicName is the topic of an engine's messages, parsed.
type topicName struct {
	Worker events.WorkerID // the pod, verbatim: IP:PORT, IP or a name
	Model  string          // empty if the topic has none
}

// topicPrefix begins every topic that names an engine.
const topicPrefix = "kv@"

// parseTopic parses the form kv@POD@MODEL, the names of llm-d and KServe for engines that dial a subscriber
// (llm-d/llm-d-kv-cache › pkg/kvevents/engineadapter/common.go, parseTopic). POD ends at the second '@' and MODEL is
// the rest, so a model's name may contain '@'. kv@POD has no model. parseTopic returns false for every other text, and
// for names that are empty, too long, not UTF-8, or contain unprintable characters.
func parseTopic(text string) (t topicName, ok bool) {
	rest, ok := strings.CutPrefix(text, topicPrefix)
	if !ok {
		return topicName{}, false
	}
	pod, model, named := strings.Cut(rest, "@")
	if !nameable(pod) || named && !nameable(model) {
		return topicName{}, false
	}
	return topicName{events.WorkerID(pod), model}, true
}

// maxTopicName is the longest name of a worker or model in a topic, in bytes.
const maxTopicName = 255

func nameable(name string) bool {
	return name != "" && len(name) <= maxTopicName && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

// Address returns the worker's name if it is the HOST:PORT of the engine's requests. An IPv6 address is in brackets.
func (t *topicName) Address() (string, bool) {
	host, port, err := net.SplitHostPort(string(t.Worker))
	if err != nil || host == "" || port == "" || strings.ContainsFunc(host, func(r rune) bool {
		return r > unicode.MaxASCII || r == '/' || r == ' ' || r == '%' || r == '#' || r == '?'
	}) || strings.ContainsFunc(port, func(r rune) bool { return r < '0' || r > '9' }) || len(port) > 5 {
		return "", false
	}
	return string(t.Worker), true
}

// payloadRank returns the data-parallel rank of a message of vLLM or SGLang, without decoding the events, or
// false if the message has no rank or is unreadable. [events.Decoder] reads the same rank.
func payloadRank(payload []byte) (rank events.Rank, ok bool) {
	r := msgp.Reader{Data: payload}
	if r.Next() == msgp.Map {
		return mapRank(&r)
	}
	n, ok := r.Array()
	if !ok || n < 3 || !r.SkipN(2) {
		return 0, false
	}
	v, ok := r.Uint(math.MaxUint32)
	return events.Rank(v), ok
}

func mapRank(r *msgp.Reader) (rank events.Rank, found bool) {
	n, ok := r.Map()
	for ; ok && n > 0; n-- {
		key, isStr := r.Str()
		if !isStr {
			r.Skip()
		}
		if k := string(key); k == "data_parallel_rank" || k == "attn_dp_rank" {
			if v, is := r.Uint(math.MaxUint32); is {
				rank, found = events.Rank(v), true
				continue
			}
		}
		ok = r.Skip()
	}
	return rank, found && ok
}

// payloadBlockSize returns the size, in tokens, of the device blocks that a message of vLLM or SGLang announces, or 0
// if it announces none.
func payloadBlockSize(payload []byte) uint32 {
	d, err := events.NewDecoder(events.DecoderConfig{Engine: events.AnyEngine, BlockSize: 1})
	if err != nil {
		return 0
	}
	m, err := d.Decode(payload)
	if err != nil {
		return 0
	}
	if other, is := errors.AsType[*events.BlockSizeError](d.Diagnosis()); is {
		return other.Got
	}
	if slices.ContainsFunc(m.Events, func(e events.Event) bool { return e.Kind == events.Stored }) {
		return 1
	}
	return 0
}
