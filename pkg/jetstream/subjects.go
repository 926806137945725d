package jetstream

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Every subject, stream, bucket, key and header of kvatlas has its name only in this file. <ns> is a namespace, <p> a
// partition in decimal, <instance>, <node>, <model>, <group> and <store> are tokens made by [EscapeToken].
//
//	kv.v1.<ns>.ev.<p>.<instance>.<rank>   events of one (worker, rank)            stream KV_EVENTS_<ns>_<p>
//	kv.v1.<ns>.q.<verb>                   queries, any ready node                 queue group
//	kv.v1.<ns>.dynamo.<model>.<verb>      requests in the form of Dynamo's router, any ready node; queue group
//	kv.v1.<ns>.node.<node>.<verb>         the same for one node, about its own data, and forwarded requests of other nodes
//	kv.v1.<ns>.nodes                      a node's new record in the bucket of nodes, for nodes that have not read it yet
//	kv.v1.<ns>.shared.<table>[.<session>]  a table that nodes keep equal (loads, sessions): to all, or to one session of a node
//	kv.v1.<ns>.engine.<instance>          an engine's report of its used memory, to all nodes
//	kv.v1.<ns>.ctl.<p>                    to the shims of a partition: publish all blocks again
//	kv.v1.<ns>.ctl.<p>.<instance>.<rank>  to one shim
//	kv.v1.<ns>.answer.<p>.<instance>.<rank>.<id>  a shim's answer to a request on a control subject
//	kv.v1.<ns>.store.<store>              events of a shared store's master; <store> is its HOST:PORT
//	kv.v1.<ns>.store.<store>.source       from a store's shim to all nodes: the store's events do not arrive
//	kv.v1.<ns>.regions.<region>.<node>    a digest of a node's blocks, to all regions; no other subject is between regions
//	kv.v1.<ns>.region                     the name of a node's region, to the nodes of its own region
//	kv.v1.<ns>.record.<node>              recorded requests of a node                  stream KV_RECORD_<ns>
//	bucket kvatlas_<ns>                   namespace record and models
//	bucket kvatlas_<ns>_snap              snapshots; their keys are pkg/snapshot's
//	bucket kvatlas_<ns>_nodes             records of indexer nodes; a record that is not renewed is deleted
//	bucket kvatlas_<ns>_workers           workers' registrations: <p>.<instance>.<rank>; serves.<instance>.<model>, the claim of a worker to serve a model; operator.<instance>, an operator's settings of a worker; and "probe", which nodes write to test the bucket
//	bucket kvatlas_<ns>_secret            the secret of the names in recorded requests
//	kv.v1.<ns>.claims.required            carries no message; a node whose user may publish there by name ignores workers under models that they have not claimed
const subjectRoot = "kv.v1."

// Names makes the names of the subjects, streams and buckets of one namespace. Its value is the namespace:
//
//	jetstream.Names("prod").Query("find")   // kv.v1.prod.q.find
type Names string

// Root begins every subject of the namespace.
func (n Names) Root() string { return subjectRoot + string(n) + "." }

// Headers. NATS's own headers: nats-server server/stream.go, ADR-50 for batches (nats-io/nats-architecture-and-design).
const (
	// on a single message of the log: <publisher>.<flush>.<position>; a batch's id begins like this
	headerWriter      = "Kv-Writer"
	headerDeadline    = rpc.HeaderDeadline
	headerContentType = rpc.HeaderContentType
	headerTrace       = rpc.HeaderTrace
	headerAnswer      = "Kv-Answer-Id" // on a request to shims: last token of their answers' subjects
	headerReply       = "Kv-Reply-To"  // on a request that a node forwards: the client's reply subject
	headerRequestID   = "X-Request-Id" // on requests of Dynamo's request plane

	headerMessageID    = "Nats-Msg-Id"
	headerExpectedLast = "Nats-Expected-Last-Subject-Sequence"
	headerBatchID      = "Nats-Batch-Id"
	headerBatchSeq     = "Nats-Batch-Sequence"
	headerBatchCommit  = "Nats-Batch-Commit"
	headerKVOperation  = "KV-Operation"
)

// ContentJSON is the content type of requests and replies in JSON.
const ContentJSON = "application/json"

const (
	maxNamespaceLen = 32
	maxNameLen      = 255 // bytes of an external name
	plainTokenLen   = 128 // a longer token is written in base64
)

// maxTokenLen is the largest length of a token of [EscapeToken].
const maxTokenLen = 2 + (maxNameLen*8+5)/6

// CheckNamespace returns an error for an invalid namespace. A namespace is part of stream, folder and bucket names, so
// it is short: 1 to 32 of a-z, 0-9 and '-', first a letter or digit. The error wraps [ErrBadName].
func CheckNamespace(ns string) error {
	unknown := func(c rune) bool { return c != '-' && (c < 'a' || c > 'z') && (c < '0' || c > '9') }
	if ns == "" || len(ns) > maxNamespaceLen || ns[0] == '-' || strings.ContainsFunc(ns, unknown) {
		return fmt.Errorf("namespace %q: %w: use 1 to %d of a-z, 0-9 and '-', first a letter or digit", ns, ErrBadName,
			maxNamespaceLen)
	}
	return nil
}

func plainByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

const hexDigits = "0123456789ABCDEF"

// EscapeToken converts a string of at most 255 bytes to a token for subjects and keys, of at most [maxTokenLen] bytes;
// [unescapeToken] converts back. Letters, digits, '-' and '_' stay, every other byte becomes '=' and two hex digits,
// and the empty string becomes "=". In place of a token of more than 128 bytes, the result is "==" and the base64 of
// the whole string (RFC 4648 §5, no padding). A longer string returns [ErrBadName].
func EscapeToken(name string) (string, error) {
	if len(name) > maxNameLen {
		return "", fmt.Errorf("name of %d bytes (%.32q...): %w: at most %d bytes", len(name), name, ErrBadName,
			maxNameLen)
	}
	if name == "" {
		return "=", nil
	}
	odd := 0
	for i := 0; i < len(name); i++ {
		if !plainByte(name[i]) {
			odd++
		}
	}
	if odd == 0 && len(name) <= plainTokenLen {
		return name, nil
	}
	if len(name)+2*odd > plainTokenLen {
		return "==" + base64.RawURLEncoding.EncodeToString([]byte(name)), nil
	}
	var b strings.Builder
	b.Grow(len(name) + 2*odd)
	for i := 0; i < len(name); i++ {
		if c := name[i]; plainByte(c) {
			b.WriteByte(c)
		} else {
			b.WriteByte('=')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
	}
	return b.String(), nil
}

// unescapeToken converts a token of [EscapeToken] to the name. A name has exactly one token; another spelling returns
// [ErrBadName].
func unescapeToken(token string) (string, error) {
	name, ok := unescape(token)
	if ok {
		again, err := EscapeToken(name)
		ok = err == nil && again == token
	}
	if !ok {
		return "", fmt.Errorf("token %.64q: %w: not an escaped name", token, ErrBadName)
	}
	return name, nil
}

func unescape(token string) (string, bool) {
	if token == "=" {
		return "", true
	}
	if len(token) > maxTokenLen {
		return "", false
	}
	if rest, ok := strings.CutPrefix(token, "=="); ok {
		raw, err := base64.RawURLEncoding.DecodeString(rest)
		return string(raw), err == nil
	}
	b := make([]byte, 0, len(token))
	for i := 0; i < len(token); i++ {
		if token[i] != '=' {
			b = append(b, token[i])
			continue
		}
		if i+2 >= len(token) {
			return "", false
		}
		hi, lo := strings.IndexByte(hexDigits, token[i+1]), strings.IndexByte(hexDigits, token[i+2])
		if hi < 0 || lo < 0 {
			return "", false
		}
		b = append(b, byte(hi<<4|lo))
		i += 2
	}
	return string(b), true
}

// ParseNamespace returns the namespace of a subject, also of a subject of the JetStream API with a stream or bucket of
// a namespace. It returns false for other subjects.
func ParseNamespace(subject string) (ns string, ok bool) {
	for _, before := range []string{subjectRoot, "KV_EVENTS_", "KV_RECORD_", "kvatlas_"} {
		if _, rest, found := strings.Cut(subject, before); found {
			end := strings.IndexFunc(rest, func(c rune) bool { return c == '.' || c == '_' })
			if end < 0 {
				end = len(rest)
			}
			return rest[:end], CheckNamespace(rest[:end]) == nil
		}
	}
	return "", false
}

// PartitionOf returns the partition of an instance: FNV-1a-32 of its token, modulo the number of partitions. The result
// equals NATS's {{partition(n,…)}} over that token (nats-server server/subject_transform.go), so a mapping in the
// server agrees with publishers.
func PartitionOf(instance events.WorkerID, partitions uint32) (events.Partition, error) {
	token, err := EscapeToken(string(instance))
	return partitionOfToken(token, partitions), err
}

func partitionOfToken(token string, partitions uint32) events.Partition {
	const offset, prime = 2166136261, 16777619 // FNV-1a, 32 bits
	h := uint32(offset)
	for i := 0; i < len(token); i++ {
		h = (h ^ uint32(token[i])) * prime
	}
	return events.Partition(h % partitions)
}

// Event is the subject of the events of one (worker, rank).
func (n Names) Event(p events.Partition, key events.RankKey) (string, error) {
	name, err := WorkerKey(p, key)
	return subjectRoot + string(n) + ".ev." + name, err
}

// parseEventSubject parses a [Names.Event]. The error wraps [ErrBadName].
func parseEventSubject(subject string) (ns string, p events.Partition, key events.RankKey, err error) {
	rest, ours := strings.CutPrefix(subject, subjectRoot)
	ns, rest, _ = strings.Cut(rest, ".")
	rest, isEvent := strings.CutPrefix(rest, "ev.")
	p, key, ok := ParseWorkerKey(rest)
	if !ours || !isEvent || !ok || CheckNamespace(ns) != nil {
		return "", 0, key, fmt.Errorf("subject %.128q: %w: want kv.v1.<ns>.ev.<p>.<instance>.<rank>", subject,
			ErrBadName)
	}
	return ns, p, key, nil
}

// Stream is the stream of a partition.
func (n Names) Stream(p events.Partition) string { return n.streamPrefix() + decimal(uint64(p)) }

// streamPrefix begins the names of the streams of a namespace's log; the partition follows.
func (n Names) streamPrefix() string { return "KV_EVENTS_" + string(n) + "_" }

// streamSubjects covers the subjects of a partition's stream.
func (n Names) streamSubjects(p events.Partition) string {
	return subjectRoot + string(n) + ".ev." + decimal(uint64(p)) + ".>"
}

// nobodysSubject is a subject of a partition's stream that belongs to no rank.
func (n Names) nobodysSubject(p events.Partition) string {
	return subjectRoot + string(n) + ".ev." + decimal(uint64(p)) + ".=.nobody"
}

// nobodysKey is a key that no bucket has.
const nobodysKey = "nobody"

// Query is the subject on which any ready node answers a kind of query.
func (n Names) Query(verb string) string { return subjectRoot + string(n) + ".q." + verb }

// Dynamo is the subject on which any ready node answers like Dynamo's router for a model. The model "*" stands
// for all models.
func (n Names) Dynamo(model, verb string) (string, error) {
	token, err := "*", error(nil)
	if model != "*" {
		token, err = EscapeToken(model)
	}
	return subjectRoot + string(n) + ".dynamo." + token + "." + verb, err
}

// ParseDynamo returns the model of a [Names.Dynamo]; false for other subjects.
func (n Names) ParseDynamo(subject string) (model string, ok bool) {
	rest, ok := strings.CutPrefix(subject, subjectRoot+string(n)+".dynamo.")
	token, _, verb := strings.Cut(rest, ".")
	if !ok || !verb {
		return "", false
	}
	model, err := unescapeToken(token)
	return model, err == nil
}

// Node is the subject on which a node answers a kind of query about the node's own data.
func (n Names) Node(node, verb string) (string, error) {
	token, err := EscapeToken(node)
	return subjectRoot + string(n) + ".node." + token + "." + verb, err
}

// ParseNodeSubject returns the node of a [Names.Node]; false for other subjects.
func ParseNodeSubject(subject string) (node string, ok bool) {
	tokens := strings.Split(subject, ".") // kv.v1.<ns>.node.<node>.<verb>
	if len(tokens) != 6 || tokens[0]+"."+tokens[1]+"." != subjectRoot || tokens[3] != "node" {
		return "", false
	}
	node, err := unescapeToken(tokens[4])
	return node, err == nil
}

// Nodes is the subject of urgent messages between nodes, before the next read of the bucket of nodes.
func (n Names) Nodes() string { return subjectRoot + string(n) + ".nodes" }

// Shared is the subject of a table that nodes keep equal, such as the requests under way: to all nodes (0), or
// to the node of a session. Nodes of earlier versions use other subjects.
func (n Names) Shared(table string, to uint64) string {
	subject := subjectRoot + string(n) + ".shared." + table
	if to != 0 {
		subject += fmt.Sprintf(".%x", to)
	}
	return subject
}

// Engine is the subject of an instance's reports of used memory to all nodes. Nodes ignore reports about other
// instances on it.
func (n Names) Engine(instance events.WorkerID) (string, error) {
	token, err := EscapeToken(string(instance))
	return subjectRoot + string(n) + ".engine." + token, err
}

// ParseEngine returns the instance of a [Names.Engine]; false for other subjects.
func (n Names) ParseEngine(subject string) (events.WorkerID, bool) {
	token, ok := strings.CutPrefix(subject, subjectRoot+string(n)+".engine.")
	if !ok {
		return "", false
	}
	name, err := unescapeToken(token)
	return events.WorkerID(name), err == nil
}

// Engines covers every [Names.Engine].
func (n Names) Engines() string { return subjectRoot + string(n) + ".engine.*" }

// Control is the subject of requests to all shims of a partition.
func (n Names) Control(p events.Partition) string {
	return subjectRoot + string(n) + ".ctl." + decimal(uint64(p))
}

// ControlRank is the subject of requests to the shim of one (worker, rank).
func (n Names) ControlRank(p events.Partition, key events.RankKey) (string, error) {
	name, err := WorkerKey(p, key)
	return subjectRoot + string(n) + ".ctl." + name, err
}

// Answer is the subject on which the shim of a rank answers the request with this id. The subject contains the
// shim's name, so a NATS server can keep shims from answering for each other.
func (n Names) Answer(p events.Partition, key events.RankKey, id string) (string, error) {
	name, err := WorkerKey(p, key)
	return n.AnswerPrefix() + name + "." + id, err
}

// isAnswerSubject reports whether a subject is a [Names.Answer] of any namespace.
func isAnswerSubject(subject string) bool {
	rest, ours := strings.CutPrefix(subject, subjectRoot)
	_, rest, _ = strings.Cut(rest, ".")
	return ours && strings.HasPrefix(rest, "answer.")
}

// parseAnswerSubject returns the rank of a [Names.Answer]; false for other subjects and invalid ranks.
func parseAnswerSubject(subject string) (key events.RankKey, ok bool) {
	if !isAnswerSubject(subject) {
		return key, false
	}
	_, rest, _ := strings.Cut(subject, ".answer.")
	at := strings.LastIndexByte(rest, '.')
	if at < 0 {
		return key, false
	}
	_, key, ok = ParseWorkerKey(rest[:at])
	return key, ok && key.Rank < events.MaxRanks
}

// AnswerPrefix begins every [Names.Answer]; a [WorkerKey] and the id follow.
func (n Names) AnswerPrefix() string { return subjectRoot + string(n) + ".answer." }

// Recall is the subject of requests for the snapshots' data of one (worker, rank).
func (n Names) Recall(p events.Partition, key events.RankKey) (string, error) {
	name, err := WorkerKey(p, key)
	return n.RecallPrefix() + name, err
}

// RecallPrefix begins every [Names.Recall] of a namespace; a [WorkerKey] follows.
func (n Names) RecallPrefix() string { return subjectRoot + string(n) + ".recall." }

// Store is the subject of the events of a shared store with a master at the HTTP address HOST:PORT.
func (n Names) Store(store string) (string, error) {
	token, err := EscapeToken(store)
	return subjectRoot + string(n) + ".store." + token, err
}

// StoreSource is the subject on which a shared store's shim reports to all nodes that the store's events do not
// arrive. The store has the name as in [Names.Store].
func (n Names) StoreSource(store string) (string, error) {
	subject, err := n.Store(store)
	return subject + storeSource, err
}

// StoreSources covers every [Names.StoreSource] of a namespace.
func (n Names) StoreSources() string { return subjectRoot + string(n) + ".store.*" + storeSource }

// ParseStoreSource returns the store of a [Names.StoreSource]; false for other subjects.
func (n Names) ParseStoreSource(subject string) (store string, ok bool) {
	rest, ok := strings.CutPrefix(subject, subjectRoot+string(n)+".store.")
	token, is := strings.CutSuffix(rest, storeSource)
	if !ok || !is {
		return "", false
	}
	store, err := unescapeToken(token)
	return store, err == nil
}

const storeSource = ".source"

// RegionDigest is the subject of the digests of a region's node. Servers pass it on to other regions.
func (n Names) RegionDigest(region, node string) (string, error) {
	token, err := EscapeToken(region)
	if err != nil {
		return "", err
	}
	last, err := EscapeToken(node)
	return subjectRoot + string(n) + ".regions." + token + "." + last, err
}

// ParseRegionDigest returns the region and the node of a [Names.RegionDigest]; false for other subjects.
func (n Names) ParseRegionDigest(subject string) (region, node string, ok bool) {
	rest, ok := strings.CutPrefix(subject, subjectRoot+string(n)+".regions.")
	token, last, split := strings.Cut(rest, ".")
	if !ok || !split {
		return "", "", false
	}
	region, err := unescapeToken(token)
	if err == nil {
		node, err = unescapeToken(last)
	}
	return region, node, err == nil
}

// RegionDigests covers every [Names.RegionDigest].
func (n Names) RegionDigests() string { return subjectRoot + string(n) + ".regions.*.*" }

// OwnRegion is the subject on which nodes send the name of their region to the nodes of the same region. A message of
// another region means that servers pass on more than digests.
func (n Names) OwnRegion() string { return subjectRoot + string(n) + ".region" }

// record is the subject of a node's recorded requests.
func (n Names) record(node string) (string, error) {
	token, err := EscapeToken(node)
	return n.recordPrefix() + token, err
}

// parseRecord returns the node of a [Names.record]; false for other subjects.
func (n Names) parseRecord(subject string) (node string, ok bool) {
	token, ok := strings.CutPrefix(subject, n.recordPrefix())
	if !ok {
		return "", false
	}
	node, err := unescapeToken(token)
	return node, err == nil
}

// recordPrefix begins every [Names.record].
func (n Names) recordPrefix() string { return subjectRoot + string(n) + ".record." }

// records covers every [Names.record] of a namespace.
func (n Names) records() string { return n.recordPrefix() + "*" }

// RecordingStream is the stream of a namespace's recorded requests.
func (n Names) RecordingStream() string { return "KV_RECORD_" + string(n) }

// SecretBucket has the secret of the names in recorded requests. Only nodes may read it.
func (n Names) SecretBucket() string { return "kvatlas_" + string(n) + "_secret" }

// secretKey is the key of the secret in its bucket.
const secretKey = "recording"

// MetaBucket has the namespace's record and its models.
func (n Names) MetaBucket() string { return "kvatlas_" + string(n) }

// SnapshotBucket has the snapshots of all partitions.
func (n Names) SnapshotBucket() string { return "kvatlas_" + string(n) + "_snap" }

// WorkersBucket has the registrations of workers and their leases.
func (n Names) WorkersBucket() string { return "kvatlas_" + string(n) + "_workers" }

// WorkerKey is the key of one (worker, rank) in the bucket of workers.
//
// A rank beyond [events.MaxRanks] returns [ErrBadName].
func WorkerKey(p events.Partition, key events.RankKey) (string, error) {
	token, err := EscapeToken(string(key.Instance))
	if err == nil && key.Rank >= events.MaxRanks {
		err = fmt.Errorf("rank %d of worker %.64q: %w: ranks are numbered 0 to %d", key.Rank, key.Instance, ErrBadName,
			events.MaxRanks-1)
	}
	return decimal(uint64(p)) + "." + token + "." + decimal(uint64(key.Rank)), err
}

// ParseWorkerKey parses a [WorkerKey]. It returns false for other keys of the bucket.
func ParseWorkerKey(text string) (p events.Partition, key events.RankKey, ok bool) {
	part, rest, _ := strings.Cut(text, ".")
	token, rank, _ := strings.Cut(rest, ".")
	pn, ok1 := parseDecimal(part)
	rn, ok2 := parseDecimal(rank)
	name, err := unescapeToken(token)
	return events.Partition(pn), events.RankKey{Instance: events.WorkerID(name), Rank: events.Rank(rn)}, ok1 && ok2 &&
		err == nil
}

// OperatorKey is the key of an operator's settings of a worker, in the bucket of workers. Shims may not write it.
func OperatorKey(instance events.WorkerID) (string, error) {
	token, err := EscapeToken(string(instance))
	return operatorPrefix + token, err
}

// ParseOperatorKey parses an [OperatorKey]. It returns false for other keys of the bucket.
func ParseOperatorKey(text string) (events.WorkerID, bool) {
	token, ok := strings.CutPrefix(text, operatorPrefix)
	if !ok {
		return "", false
	}
	name, err := unescapeToken(token)
	return events.WorkerID(name), err == nil
}

const operatorPrefix = "operator."

// ClaimKey returns the key of a model claim in the bucket of workers: the statement that a worker serves a model. A
// NATS server can restrict a shim to the claims of its own worker and models.
func ClaimKey(instance events.WorkerID, model string) (string, error) {
	prefix, err := ClaimPrefix(instance)
	if err != nil {
		return "", err
	}
	token, err := EscapeToken(model)
	return prefix + token, err
}

// ClaimPrefix begins every [ClaimKey] of a worker.
func ClaimPrefix(instance events.WorkerID) (string, error) {
	token, err := EscapeToken(string(instance))
	return claimPrefix + token + ".", err
}

// ClaimSubject is the subject of a [ClaimKey], for the tokens of its worker and model. The token "*" stands for all.
func (n Names) ClaimSubject(worker, model string) string {
	return KeySubject(n.WorkersBucket(), claimPrefix+worker+"."+model)
}

// ParseClaimKey returns the worker and the model of a [ClaimKey]; false for other keys of the bucket.
func ParseClaimKey(text string) (instance events.WorkerID, model string, ok bool) {
	rest, ok := strings.CutPrefix(text, claimPrefix)
	worker, token, split := strings.Cut(rest, ".")
	if !ok || !split {
		return "", "", false
	}
	name, err := unescapeToken(worker)
	if err != nil {
		return "", "", false
	}
	model, err = unescapeToken(token)
	return events.WorkerID(name), model, err == nil
}

const claimPrefix = "serves."

// ClaimsRequired returns the marker subject of a namespace in which workers must claim their models. No program
// publishes there. A node enforces claims if the publish permissions of the node's NATS user list this subject by name.
// See [Namespace.ClaimsRequired].
func (n Names) ClaimsRequired() string { return subjectRoot + string(n) + ".claims.required" }

// JunkKey reports whether a key of the bucket of workers is writable by shims and belongs neither to a rank nor to a
// claim. Keys of unknown kinds are no junk: a later release may use them.
func JunkKey(key string) bool {
	kind, _, _ := strings.Cut(key, ".")
	if kind+"." == claimPrefix {
		_, _, claim := ParseClaimKey(key)
		return !claim
	}
	_, rank, ok := ParseWorkerKey(key)
	_, partition := parseDecimal(kind)
	return partition && (!ok || rank.Rank >= events.MaxRanks)
}

// ProbeKey is the key of the bucket of workers that nodes write to test the bucket.
const ProbeKey = "probe"

// NodesBucket has the announcements of indexer nodes.
func (n Names) NodesBucket() string { return "kvatlas_" + string(n) + "_nodes" }

// Keys of the meta bucket.
const namespaceKey = "namespace"

func modelKey(model string) (string, error) {
	token, err := EscapeToken(model)
	return modelPrefix + token, err
}

// parseModelKey returns the model of a key of modelKey; false for other keys.
func parseModelKey(key string) (model string, ok bool) {
	token, ok := strings.CutPrefix(key, modelPrefix)
	if !ok {
		return "", false
	}
	model, err := unescapeToken(token)
	return model, err == nil
}

const modelPrefix = "model."

// ModelSubject is the subject of a model's record, for the model's token. The token "*" stands for all models.
func (n Names) ModelSubject(token string) string {
	return KeySubject(n.MetaBucket(), modelPrefix+token)
}

// forgottenKey is the key of the record that a model's record was erased. Shims may not write it.
func forgottenKey(model string) (string, error) {
	token, err := EscapeToken(model)
	return forgottenPrefix + token, err
}

// parseForgottenKey returns the model of a [forgottenKey]; false for other keys.
func parseForgottenKey(key string) (model string, ok bool) {
	token, ok := strings.CutPrefix(key, forgottenPrefix)
	if !ok {
		return "", false
	}
	model, err := unescapeToken(token)
	return model, err == nil
}

const forgottenPrefix = "forgotten."

// validKey reports whether a key can be part of a subject without escapes (the rule of nats.go jetstream/kv.go).
func validKey(key string) bool {
	if key == "" || key[0] == '.' || key[len(key)-1] == '.' || strings.Contains(key, "..") {
		return false
	}
	for i := 0; i < len(key); i++ {
		if c := key[i]; !plainByte(c) && c != '/' && c != '=' && c != '.' {
			return false
		}
	}
	return true
}

// BucketStream returns the stream of a bucket.
func BucketStream(bucket string) string { return "KV_" + bucket }

// KeySubject returns the subject of a key of a bucket. The key may have wildcards.
func KeySubject(bucket, key string) string { return "$KV." + bucket + "." + key }

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

func parseDecimal(s string) (n uint32, ok bool) {
	v, err := strconv.ParseUint(s, 10, 32)
	return uint32(v), err == nil && decimal(v) == s
}
