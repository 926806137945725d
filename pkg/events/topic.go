package events

import (
	"errors"
	"math"
	"net"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// Topic is what the topic of an engine's messages says of the engine.
type Topic struct {
	Worker WorkerID // the pod: IP:PORT, IP or a name, as the topic has it
	Model  string   // empty if the topic names none
}

// topicPrefix is how topics begin that name an engine.
const topicPrefix = "kv@"

// ParseTopic reads the form kv@POD@MODEL, in which llm-d and KServe name the engines that dial one subscriber
// (llm-d/llm-d-kv-cache › pkg/kvevents/engineadapter/common.go, parseTopic). POD is what is between the first two '@'
// and MODEL all that follows, so a model's name may contain '@'. kv@POD names no model. It returns false for every
// other text, and for names that are empty, too long, not UTF-8, or contain characters that cannot be printed.
func ParseTopic(text string) (t Topic, ok bool) {
	rest, ok := strings.CutPrefix(text, topicPrefix)
	if !ok {
		return Topic{}, false
	}
	pod, model, named := strings.Cut(rest, "@")
	if !nameable(pod) || named && !nameable(model) {
		return Topic{}, false
	}
	return Topic{WorkerID(pod), model}, true
}

// maxTopicName is the longest name of a worker or model in a topic, in bytes.
const maxTopicName = 255

func nameable(name string) bool {
	return name != "" && len(name) <= maxTopicName && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

// Address returns the HOST:PORT at which the engine takes requests, if the worker's name is one. An IPv6 address is in
// brackets.
func (t *Topic) Address() (string, bool) {
	host, port, err := net.SplitHostPort(string(t.Worker))
	if err != nil || host == "" || port == "" || strings.ContainsFunc(host, func(r rune) bool {
		return r > unicode.MaxASCII || r == '/' || r == ' ' || r == '%' || r == '#' || r == '?'
	}) || strings.ContainsFunc(port, func(r rune) bool { return r < '0' || r > '9' }) || len(port) > 5 {
		return "", false
	}
	return string(t.Worker), true
}

// PayloadRank returns the data-parallel rank that a message of vLLM or SGLang names, without decoding its events. It
// returns false if the message names none or cannot be read. [Decoder] reads the same rank.
func PayloadRank(payload []byte) (rank Rank, ok bool) {
	r := msgp.Reader{Data: payload}
	if r.Next() == msgp.Map {
		return mapRank(&r)
	}
	n, ok := r.Array()
	if !ok || n < 3 || !r.SkipN(2) {
		return 0, false
	}
	v, ok := r.Uint(math.MaxUint32)
	return Rank(v), ok
}

func mapRank(r *msgp.Reader) (rank Rank, found bool) {
	n, ok := r.Map()
	for ; ok && n > 0; n-- {
		key, isStr := r.Str()
		if !isStr {
			r.Skip()
		}
		if k := string(key); k == "data_parallel_rank" || k == "attn_dp_rank" {
			if v, is := r.Uint(math.MaxUint32); is {
				rank, found = Rank(v), true
				continue
			}
		}
		ok = r.Skip()
	}
	return rank, found && ok
}

// PayloadBlockSize returns how many tokens are in the device blocks that a message of vLLM or SGLang announces. It
// returns 0 if the message announces none.
func PayloadBlockSize(payload []byte) uint32 {
	d, err := NewDecoder(DecoderConfig{Engine: AnyEngine, BlockSize: 1})
	if err != nil {
		return 0
	}
	m, err := d.Decode(payload)
	if err != nil {
		return 0
	}
	if other, is := errors.AsType[*BlockSizeError](d.Diagnosis()); is {
		return other.Got
	}
	if slices.ContainsFunc(m.Events, func(e Event) bool { return e.Kind == Stored }) {
		return 1
	}
	return 0
}
