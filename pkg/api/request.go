package api

import (
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// UnknownFields says what becomes of fields of a request that this version does not know.
type UnknownFields int

// The ways.
const (
	// RefuseUnknown is for clients' requests: a field that is not known is most often one that is misspelt, and the
	// answer would be to another question.
	RefuseUnknown UnknownFields = iota

	// IgnoreUnknown is for what nodes ask each other: one of a newer version may say more than is known here, and asks
	// only what it gets by with if that is not heeded.
	IgnoreUnknown
)

// reader reads requests from a source: it holds the rules that are the same for each form. What is given is taken for
// what it says, or refused by name.
type reader struct {
	source
	unknown UnknownFields

	prefix  string // the field whose value is read; empty: it is the body
	within  string // the list whose element is read; empty: none
	element int
}

// readRequest reads the whole of a body as what says.
func readRequest(contentType string, body []byte, unknown UnknownFields, what func(r *reader) error) error {
	s, err := openSource(contentType, body)
	if err == nil {
		err = what(&reader{source: s, unknown: unknown})
	}
	if err == nil {
		err = s.end()
	}
	return notForm(contentType, err)
}

// name is what a field is called in messages.
func (r *reader) name(field string) string {
	if r.within == "" {
		if r.prefix != "" && field != "" {
			return r.prefix + "." + field
		}
		return r.prefix + field
	}
	name := r.within + "[" + strconv.Itoa(r.element) + "]"
	if field == "" { // the element itself
		return name
	}
	return name + "." + field
}

// isNot is the error of a value that is not what a field wants.
func (r *reader) isNot(field, want string) error {
	if r.kind() == kindNone {
		return r.skip() // which says what is wrong
	}
	return Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), r.shown(), want)
}

// fields reads an object that has the known fields, each at most once. One that is null is as if it were not there.
func (r *reader) fields(what string, known []string, each func(field string) error) error {
	if r.kind() != kindObject {
		return r.isNot(what, "an object")
	}
	var seen uint64
	return r.object(func(key []byte) error {
		for i, field := range known {
			if string(key) != field {
				continue
			}
			if seen&(1<<i) != 0 {
				return Errorf(CodeMalformed, "%s is given twice", r.name(field))
			}
			seen |= 1 << i
			if r.kind() == kindNull {
				r.null()
				return nil
			}
			return each(field)
		}
		if r.unknown == IgnoreUnknown {
			return r.skip()
		}
		return noField(r.name(string(key)), string(key), known)
	})
}

// optional reads a request that may be null.
func (r *reader) optional(known []string, each func(field string) error) error {
	if r.kind() == kindNull {
		r.null()
		return nil
	}
	return r.fields("the request", known, each)
}

// each reads a list; the names of fields in its elements tell which element they are of.
func (r *reader) each(field string, element func() error) error {
	if r.kind() != kindList {
		return r.isNot(field, "a list")
	}
	defer func(within string, element int) { r.within, r.element = within, element }(r.within, r.element)
	name := r.name(field)
	return r.list(func(i int) error {
		r.within, r.element = name, i
		return element()
	})
}

func (r *reader) string(field string, to *string) error {
	if k := r.kind(); k != kindText && k != kindBytes {
		return r.isNot(field, "text")
	}
	s, valid, err := r.text()
	if err == nil && !valid {
		return Errorf(CodeMalformed, "%s is not UTF-8: %s", r.name(field), shorten(s))
	}
	*to = s
	return err
}

func (r *reader) bool(field string, to *bool) error {
	if r.kind() != kindTruth {
		return r.isNot(field, "true or false")
	}
	*to = r.truth()
	return nil
}

// uint reads an unsigned number up to a bound.
func (r *reader) uint(field, want string, most uint64) (uint64, error) {
	if r.kind() != kindNumber {
		return 0, r.isNot(field, want)
	}
	shown := r.shown()
	v, is, err := r.whole()
	if err == nil && (is != positive || v > most) {
		return 0, Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), shown, want)
	}
	return v, err
}

func (r *reader) uint32(field string, to *uint32) error {
	v, err := r.uint(field, wantToken, 1<<32-1)
	*to = uint32(v)
	return err
}

// given is uint32 for a field that is left out where 0 would be meant.
func (r *reader) given(field, instead string, to *uint32) error {
	err := r.uint32(field, to)
	if err == nil && *to == 0 {
		return Errorf(CodeMalformed, "%s is 0; %s", r.name(field), instead)
	}
	return err
}

// uint64 reads a number that may come as text in decimal digits, since many programs round numbers above 2^53.
func (r *reader) uint64(field string, to *uint64) error {
	if r.kind() != kindText {
		v, err := r.uint(field, wantSeq, 1<<64-1)
		*to = v
		return err
	}
	shown := r.shown()
	word, _, err := r.text()
	if err != nil {
		return err
	}
	v, is := parseWhole([]byte(word))
	if is != positive {
		return Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), shown, wantSeq)
	}
	*to = v
	return nil
}

// readTokens and readHashes read lists of numbers.
func (r *reader) readTokens(field string, to *Tokens) (err error) {
	if k := r.kind(); k != kindList && k != kindBytes {
		if k == kindNone {
			return r.skip()
		}
		return Errorf(CodeBadTokens, "%s must be an array, each of it %s", r.name(field), wantToken)
	}
	*to, err = r.tokens(r.name(field))
	return err
}

func (r *reader) readHashes(field string, to *Hashes) (err error) {
	if k := r.kind(); k != kindList && k != kindBytes {
		return r.isNot(field, "an array, each of it "+wantHash)
	}
	*to, err = r.hashes(r.name(field))
	return err
}

var (
	queryFields = []string{
		"model", "block_size", "tokens", "hashes", "hashed", "engine_hashes", "lora_name", "cache_salt", "workers", "ranks",
		"endpoints", "with_endpoint", "by_endpoint", "partitions", "min_seq", "deadline_ms",
		"explain", "idle", "l3", "l3_timeout_ms",
	}
	findFields    = slices.Concat(queryFields, textFields)
	hashedFields  = []string{"lookahead", "hashes"}
	placeFields   = []string{"partition", "seq"}
	workersFields = []string{"after", "limit"}
	rankFields    = []string{"instance", "rank"}
	statusFields  = []string{"node"}
	verifyFields  = []string{"at"}
)

// readQuery reads a query.
func readQuery(r *reader, q *Query) error {
	return r.fields("the query", findFields, func(field string) error { return r.query(field, q) })
}

// query reads one of [queryFields] and [textFields].
func (r *reader) query(field string, q *Query) error {
	switch field {
	case "model":
		return r.string(field, &q.Model)
	case "block_size":
		return r.given(field, "leave it out to ask whatever the model's block size is", &q.BlockSize)
	case "tokens":
		return r.readTokens(field, &q.Tokens)
	case "hashes":
		return r.readHashes(field, &q.Hashes)
	case "engine_hashes":
		return r.readHashes(field, &q.EngineHashes)
	case "hashed":
		q.Hashed = []Hashed{}
		return r.each(field, func() error {
			var h Hashed
			defer func() { q.Hashed = append(q.Hashed, h) }()
			return r.fields("", hashedFields, func(field string) error {
				if field == "lookahead" {
					return r.uint32(field, &h.Lookahead)
				}
				return r.readHashes(field, &h.Hashes)
			})
		})
	case "lora_name":
		return r.string(field, &q.LoRA)
	case "cache_salt":
		return r.string(field, &q.CacheSalt)
	case "workers":
		q.Workers = []events.WorkerID{}
		return r.each(field, func() error {
			var name string
			err := r.string("", &name)
			q.Workers = append(q.Workers, events.WorkerID(name))
			return err
		})
	case "ranks":
		q.Ranks = []RankPlace{}
		return r.each(field, func() error {
			var at RankPlace
			err := readRankPlace(r, "", &at)
			if err == nil && at.Instance == "" {
				return Errorf(CodeMalformed, "%s names no instance", r.name(""))
			}
			q.Ranks = append(q.Ranks, at)
			return err
		})
	case "endpoints":
		return r.texts(field, &q.Endpoints)
	case "with_endpoint":
		return r.bool(field, &q.WithEndpoint)
	case "by_endpoint":
		return r.bool(field, &q.ByEndpoint)
	case "partitions":
		q.Partitions = []events.Partition{}
		return r.each(field, func() error {
			var p uint32
			err := r.uint32("", &p)
			q.Partitions = append(q.Partitions, events.Partition(p))
			return err
		})
	case "min_seq":
		return readPlaces(r, field, &q.MinSeq)
	case "deadline_ms":
		return r.given(field, "leave it out for as long as the request has", &q.DeadlineMS)
	case "explain":
		return r.bool(field, &q.Explain)
	case "idle":
		return r.bool(field, &q.Idle)
	case "l3":
		return r.string(field, (*string)(&q.L3))
	case "l3_timeout_ms":
		return r.given(field, `leave it out for what the node is set to, or say "l3":"off"`, &q.L3TimeoutMS)
	default: // of a text
		if q.Text == nil {
			q.Text = &Text{}
		}
		return r.readText(field, q.Text)
	}
}

// readPlaces reads places in the log.
func readPlaces(r *reader, field string, to *[]PartitionSeq) error {
	*to = []PartitionSeq{}
	return r.each(field, func() error {
		var partition uint32
		var seq uint64
		seen := 0
		err := r.fields("", placeFields, func(field string) error {
			seen++
			if field == "partition" {
				return r.uint32(field, &partition)
			}
			return r.uint64(field, &seq)
		})
		if err == nil && seen < len(placeFields) {
			return Errorf(CodeMalformed, "%s[%d] needs a partition and a seq", r.within, r.element)
		}
		*to = append(*to, PartitionSeq{events.Partition(partition), events.StreamSeq(seq)})
		return err
	})
}

// readWorkers reads which part of the list of workers is wanted.
func readWorkers(r *reader, w *WorkersRequest) error {
	return r.optional(workersFields, func(field string) error {
		if field == "limit" {
			v, err := r.uint(field, "a number of workers", 1<<31-1)
			w.Limit = int(v)
			return err
		}
		w.After = &RankPlace{}
		return readRankPlace(r, field, w.After)
	})
}

func readStatus(r *reader, s *StatusRequest) error {
	return r.optional(statusFields, func(field string) error { return r.string(field, &s.Node) })
}

func readVerify(r *reader, v *VerifyRequest) error {
	return r.optional(verifyFields, func(field string) error { return readPlaces(r, field, &v.At) })
}

// readNothing reads a request that says nothing.
func readNothing(r *reader, _ *struct{}) error { return r.optional(nil, nil) }

// readRankPlace reads the object that is within a field, or is an element of a list.
func readRankPlace(r *reader, within string, to *RankPlace) error {
	prefix := within
	if prefix != "" {
		prefix += "."
	}
	return r.fields(within, rankFields, func(field string) error {
		if field == "instance" {
			return r.string(prefix+field, (*string)(&to.Instance))
		}
		return r.uint32(prefix+field, (*uint32)(&to.Rank))
	})
}

// meant is what fields of other systems' requests are called here; what begins with a blank is advice in place of a
// name.
var meant = map[string]string{
	"token_ids": "tokens", "prompt_token_ids": "tokens", "input_ids": "tokens", "block_hashes": "hashes",
	"model_name": "model", "lora": "lora_name", "lora_id": "lora_name", "adapter": "lora_name", "salt": "cache_salt",
	"instances": "workers", "instance": "workers", "worker": "workers", "worker_ids": "workers",
	"block_mm_infos": " hash the blocks with their multimodal items and ask with hashes, or ask POST /query",
	"prompt":         " only tokens and hashes are counted here: tokenize it first",
	"messages":       " only tokens and hashes are counted here: tokenize them first",
	"text":           "prompt", "input": "prompt",
	"timeout_ms":        " the deadline travels in the header Kv-Deadline-Ms",
	"routing_group":     " a routing group other than default is a model of its own: MODEL:GROUP",
	"additional_salt":   " what is part of the hashes is lora_name and cache_salt",
	"extra_keys":        " what is part of the hashes is lora_name and cache_salt",
	"parent_hash":       " hashes are those of the prompt from its first block on",
	"block_hash_parent": " hashes are those of the prompt from its first block on",
}

// noField is the error of a field that is not known.
func noField(name, key string, known []string) error {
	said := ""
	switch other, has := meant[strings.ToLower(key)], ""; {
	case strings.HasPrefix(other, " ") && slices.Contains(known, "tokens"):
		said = ";" + other
	default:
		for _, field := range known {
			near := distance(plain(key), plain(field)) <= min(2, len(field)/3)
			if other == field || plain(key) == plain(field) || near {
				has = field
				break
			}
		}
		switch {
		case has != "":
			said = "; did you mean \"" + has + "\"?"
		case len(known) > 0:
			said = "; there are " + strings.Join(known, ", ")
		default:
			said = ": nothing may be said there"
		}
	}
	return Errorf(CodeMalformed, "there is no field %q%s", shorten(name), said)
}

// plain is a name without what differs between styles.
func plain(name string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "", " ", "").Replace(name))
}

// distance is how many letters must be put in, left out, changed or swapped with the next to make b of a, if that is 2
// or less.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
