package events

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/tools/randval"
)

// naiveDecoder is the naive form of a decoder: rules over the values of another MessagePack library.
type naiveDecoder struct {
	engine Engine
	block  uint64
	unsure bool
	salts  map[BlockHash]string
	zero   bool
	counts SkipCounts

	right, other map[uint64]bool      // main groups by the size of their device blocks
	chains       map[[2]uint64]uint64 // the number of tokens in the chain of smaller blocks up to a group's block
}

var (
	storedNames = []string{"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
		"lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}
	removedNames = []string{"type", "block_hashes", "medium", "group_idx"}
	digestLike   = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)
)

func (n *naiveDecoder) decode(payload []byte) (Message, error) {
	var v any
	if err := msgpack.Unmarshal(payload, &v); err != nil {
		return Message{}, err
	}
	var m Message
	var ts, list, rank any
	switch v := v.(type) {
	case []any:
		if len(v) < 2 {
			return Message{}, errors.New("short")
		}
		ts, list = v[0], v[1]
		if len(v) > 2 {
			rank = v[2]
		}
	case map[string]any:
		ts, list = v["ts"], v["events"]
		rank = v["data_parallel_rank"]
		if r, ok := v["attn_dp_rank"]; ok {
			rank = r
		}
	default:
		return Message{}, errors.New("neither array nor map")
	}
	switch ts := ts.(type) {
	case float64:
		m.Timestamp = ts
	case nil:
	default:
		if bits, negative, ok := randval.AsInteger(ts); ok && negative {
			m.Timestamp = float64(int64(bits))
		} else if ok {
			m.Timestamp = float64(bits)
		} else {
			n.counts[skipField]++
		}
	}
	if r, ok := n.small(rank); ok {
		m.HasRank, m.Rank = true, Rank(r)
	}
	events, ok := list.([]any)
	if !ok {
		return Message{}, errors.New("no events")
	}
	for _, e := range events {
		taken, skip := n.event(e)
		if skip != "" {
			n.count(skip)
		}
		m.Events = append(m.Events, taken...)
	}
	return m, nil
}

func (n *naiveDecoder) count(name string) {
	for s := range Skip(skipKinds) {
		if s.String() == name {
			n.counts[s]++
			return
		}
	}
	panic("no skip is called " + name)
}

// integer is a number of 32 bits.
func (n *naiveDecoder) integer(v any) (uint64, bool) {
	bits, negative, ok := randval.AsInteger(v)
	return bits, ok && !negative && bits <= math.MaxUint32
}

// copies decodes copies of a main group below the device without extra keys.
func (n *naiveDecoder) copies(e Event, fields map[string]any, size uint64, tokens []uint32, grouped bool, named func(),
) ([]Event, string) {
	names, whole := uint64(len(e.Blocks)), size%n.block == 0
	switch {
	case len(tokens) == 0 && size == 0:
		e.Chunk = ChunkSizeUnknown
	case len(tokens) == 0 && whole:
		e.Chunk = uint32(size / n.block)
	case len(tokens) == 0:
	case size == 0 || !whole:
		return nil, n.otherSize(e, size, 0, false, 0)
	case names*size != uint64(len(tokens)):
		return nil, "length_mismatch"
	case names == 1 || size > n.block:
		e.Chunk = uint32(size / n.block)
	case grouped && e.Attention != AttentionUnknown:
		e.Chunk = uint32(names)
	}
	named()
	if len(tokens) == 0 {
		return []Event{e}, ""
	}
	n.count("copy_tokens")
	described := false
	for _, field := range []string{"lora_name", "cache_salt"} {
		text, _ := fields[field].(string)
		described = described || text != ""
	}
	id, _, isNumber := randval.AsInteger(fields["lora_id"])
	text, isText := fields["lora_id"].(string)
	if fields["lora_id"] != nil && !(isNumber && id == 0 || isText && text == "") {
		described = true
	}
	_, ahead := fields["lookahead_token_ids"]
	_, media := fields["mm_keys"]
	if names == 1 && e.Tier == Host && !grouped && e.Attention == AttentionUnknown && !described && !ahead && !media {
		e.Own = true
		for ; len(tokens) > 0; tokens = tokens[n.block:] {
			e.Locals = append(e.Locals, hashTokens(tokens[:n.block], baseSeed))
		}
		if parent, ok := n.name(fields["parent_block_hash"]); ok {
			e.HasParent, e.Parent = true, parent
		}
	}
	return []Event{e}, ""
}

// small is an optional number of 32 bits.
func (n *naiveDecoder) small(v any) (uint64, bool) {
	if bits, negative, ok := randval.AsInteger(v); ok && !negative && bits <= math.MaxUint32 {
		return bits, true
	}
	if v != nil {
		n.counts[skipField]++
	}
	return 0, false
}

func (n *naiveDecoder) event(v any) ([]Event, string) {
	fields, isMap := v.(map[string]any)
	elements, isArray := v.([]any)
	if isArray && len(elements) > 0 {
		names := []string{"type"}
		switch elements[0] {
		case "BlockStored":
			names = storedNames
		case "BlockRemoved":
			names = removedNames
		case "TierBlocksCleared":
			names = []string{"type", "medium"}
		}
		fields = map[string]any{}
		for i, name := range names {
			if i < len(elements) {
				fields[name] = elements[i]
			}
		}
	} else if !isMap {
		return nil, "malformed_event"
	}
	if extras, ok := fields["lora_name"].(map[string]any); ok {
		delete(fields, "lora_name")
		for _, name := range []string{"cache_salt", "lora_name", "session_id"} {
			if v, ok := extras[name]; ok {
				fields[name] = v
			}
		}
	}
	// Optional fields have their own counts.
	group, _ := n.small(fields["group_idx"])
	attention := AttentionUnknown
	switch kind := fields["kv_cache_spec_kind"].(type) {
	case string:
		attention = attentionOf(kind)
	case nil:
	default:
		n.counts[skipField]++
	}

	window, _ := n.small(fields["kv_cache_spec_sliding_window"])
	if size, _, ok := randval.AsInteger(fields["block_size"]); !attention.Windowed() || !ok || size != n.block {
		window = 0
	}
	for g := range n.other {
		if attention.Main() && len(n.right) > 0 && !n.right[g] {
			window = 1
		}
	}
	session, isStr := fields["session_id"].(string)
	if !isStr && fields["session_id"] != nil || len(session) > 256 {
		n.counts[skipField]++
		delete(fields, "session_id")
	}
	if _, isStr := fields["origin"].(string); !isStr && fields["origin"] != nil {
		n.counts[skipField]++
	}

	kind, ok := fields["type"].(string)
	if !ok {
		return nil, "malformed_event"
	}
	switch kind {
	case "AllBlocksCleared":
		n.salts = map[BlockHash]string{}
		return []Event{{Kind: Cleared, Reason: ReasonEngine}}, ""
	case "TierBlocksCleared", "BlockRemoved", "BlockStored":
	default:
		return nil, "unknown_type"
	}

	// Faults of all types of events. Names of another type than array count as no names.
	hashes, ok := fields["block_hashes"].([]any)
	notNames := !ok && fields["block_hashes"] != nil
	tier, tierOK := Device, true
	if kind == "TierBlocksCleared" {
		tier = AllTiers
	}
	switch medium := fields["medium"].(type) {
	case string:
		tier, tierOK = tierOfMedium(medium)
	case nil:
	default:
		tierOK = false
	}
	where, isStr := fields["locality"].(string)
	remote := fields["locality"] != nil && !(isStr && strings.EqualFold(where, "local"))
	for _, c := range []struct {
		bad  bool
		name string
	}{{notNames, "malformed_event"}, {remote, "not_local"}, {!tierOK, "unknown_medium"}} {
		if c.bad {
			return nil, c.name
		}
	}
	if kind == "TierBlocksCleared" {
		if tier == AllTiers {
			n.salts = map[BlockHash]string{}
		}
		return []Event{{Kind: Cleared, Tier: tier, Reason: ReasonEngine}}, ""
	}

	var blocks []BlockHash
	unreadable := false
	for _, h := range hashes {
		if name, ok := n.name(h); ok {
			blocks = append(blocks, name)
		} else {
			unreadable = true
		}
	}
	if kind == "BlockRemoved" {
		if unreadable {
			n.count("bad_hash")
		} else if len(blocks) == 0 {
			return nil, "no_blocks"
		}
		if len(blocks) == 0 {
			return nil, ""
		}
		return []Event{{Kind: Removed, Tier: tier, Group: GroupIndex(group), Blocks: blocks}}, ""
	}
	e := Event{Kind: Stored, Tier: tier, Group: GroupIndex(group), Attention: attention, Window: uint32(window),
		Blocks: blocks}
	return n.stored(e, fields, unreadable, isArray, isArray && len(elements) <= 9)
}

func (n *naiveDecoder) stored(e Event, fields map[string]any, unreadable, isArray, old bool) ([]Event, string) {
	var spoiled []string
	parent, parentOK := n.name(fields["parent_block_hash"])
	if fields["parent_block_hash"] != nil && !parentOK || unreadable {
		spoiled = append(spoiled, "bad_hash")
	}
	tokenList, ok := fields["token_ids"].([]any)
	if !ok && fields["token_ids"] != nil {
		spoiled = append(spoiled, "malformed_event")
	}
	numbers := slices.Clone(tokenList) // a text only invalidates the blocks from its place on
	cut := slices.IndexFunc(numbers, isText)
	for i := range numbers {
		if isText(numbers[i]) {
			numbers[i] = uint64(0)
		}
	}
	tokens, eagle, ok := naiveTokens(numbers)
	if !ok {
		spoiled = append(spoiled, "bad_token")
	}
	size, sizeNegative, sizeOK := randval.AsInteger(fields["block_size"])
	if fields["block_size"] != nil && (!sizeOK || sizeNegative || size > math.MaxUint32) {
		spoiled = append(spoiled, "malformed_event")
	}
	lora, ok1 := fields["lora_name"].(string)
	salt, ok2 := fields["cache_salt"].(string)
	if !ok1 && fields["lora_name"] != nil || !ok2 && fields["cache_salt"] != nil {
		spoiled = append(spoiled, "unreadable_space")
	}
	if fields["origin"] == "REUSED" {
		spoiled = append(spoiled, "reused")
	}
	if len(spoiled) > 0 {
		for _, name := range skipNames { // the first reason in the list counts
			if slices.Contains(spoiled, name) {
				return nil, name
			}
		}
	}
	if len(e.Blocks) == 0 && e.Attention.Bounds() {
		return []Event{e}, ""
	}
	if len(e.Blocks) == 0 {
		return nil, "no_blocks"
	}
	_, grouped := n.integer(fields["group_idx"])
	if n.engine == VLLM && fields["medium"] == "cpu" && grouped && e.Attention == AttentionUnknown {
		return nil, "shared_store"
	}
	hasParent := parentOK && (parent != 0 || n.zero)
	named := func() {
		for _, name := range e.Blocks {
			n.zero = n.zero || name == 0
		}
	}
	fits := uint64(len(e.Blocks))*size == uint64(len(tokenList))
	id, idKnown := "", true
	switch v := fields["lora_id"].(type) {
	case string:
		id = v
	case nil:
	default:
		bits, negative, ok := randval.AsInteger(v)
		if idKnown = ok && !negative; idKnown && (bits > 0 || !isArray) {
			id = strconv.FormatUint(bits, 10)
		}
	}
	switch {
	case n.engine == VLLM && e.Tier != Device && fields["extra_keys"] == nil && e.Attention.Main():
		if cut >= 0 {
			return nil, "bad_token"
		}
		return n.copies(e, fields, size, tokens[:len(tokenList)], grouped, named)
	case len(tokenList) == 0:
		named()
		return []Event{e}, ""
	case !e.Attention.Main() && (size != n.block || !fits):
		n.count("sparse_group_tokens")
		named()
		return []Event{e}, ""
	case size != n.block:
		return nil, n.otherSize(e, size, parent, hasParent, uint64(len(tokenList)))
	case !fits:
		return nil, "length_mismatch"
	case n.unsure && lora == "" && id == "":
		return nil, "unnamed_adapter"
	}
	seen := map[BlockHash]bool{}
	if hasParent {
		seen[parent] = true
	}
	for _, name := range e.Blocks {
		if seen[name] {
			return nil, "repeated_hash"
		}
		seen[name] = true
	}

	// The space of the blocks.
	media := make([][]BlockMedia, len(e.Blocks))
	shownSalt := salt
	if keys, ok := fields["extra_keys"].([]any); ok && !allNil(keys) {
		if len(keys) != len(e.Blocks) {
			return nil, "unreadable_space"
		}
		for i, k := range keys {
			items, ok := k.([]any)
			if !ok && k != nil {
				return nil, "unreadable_space"
			}
			if i == 0 && len(items) > 0 && lora == "" && id != "" {
				if s, ok := items[0].(string); ok {
					lora = s
				}
			}
			if len(items) > 0 && lora != "" && items[0] == any(lora) {
				items = items[1:]
			}
			for _, item := range items {
				if s, ok := item.(string); ok && strings.HasPrefix(s, dynamoSalt) {
					shownSalt = strings.TrimPrefix(s, dynamoSalt)
				}
			}
			for j, item := range items {
				switch v := item.(type) {
				case string:
					laterNames := false
					for _, x := range items[j+1:] {
						_, isArray := x.([]any)
						s, isStr := x.(string)
						laterNames = laterNames || isArray || isStr && !strings.HasPrefix(s, dynamoSalt)
					}
					switch {
					case strings.HasPrefix(v, dynamoSalt):
					case i == 0 && !hasParent && !laterNames && !(old && digestLike.MatchString(v)) &&
						(shownSalt == "" || shownSalt == v):
						shownSalt = v
					default:
						media[i] = append(media[i], BlockMedia{naiveDynamo(v), NoOffset})
					}
				case []any:
					if len(v) == 0 {
						return nil, "unreadable_space"
					}
					m, ok := naiveMedia(v[0])
					if !ok {
						return nil, "unreadable_space"
					}
					item := BlockMedia{m, NoOffset}
					if s, isText := v[0].(string); isText {
						item.Hash = naiveDynamo(s)
					}
					if len(v) > 1 {
						if bits, _, ok := randval.AsInteger(v[1]); ok {
							item = BlockMedia{m, int64(bits)}
						}
					}
					media[i] = append(media[i], item)
				case []byte:
					m, _ := naiveMedia(v)
					media[i] = append(media[i], BlockMedia{m, NoOffset})
				default:
					return nil, "unreadable_space"
				}
			}
		}
	} else if !ok && fields["extra_keys"] != nil {
		return nil, "unreadable_space"
	}
	ahead := make([][]uint32, len(e.Blocks))
	if list, ok := fields["lookahead_token_ids"].([]any); ok && !allNil(list) {
		if len(list) != len(e.Blocks) {
			return nil, "unreadable_lookahead"
		}
		for i, l := range list {
			one, isArray := l.([]any)
			if !isArray && l != nil {
				one = []any{l}
			}
			if len(one) > 0 {
				if _, isPair := one[0].([]any); isPair {
					return nil, "unreadable_lookahead"
				}
			}
			var ok bool
			if ahead[i], _, ok = naiveTokens(one); !ok || len(ahead[i]) != len(ahead[0]) {
				return nil, "unreadable_lookahead"
			}
		}
	} else if !ok && fields["lookahead_token_ids"] != nil {
		return nil, "unreadable_lookahead"
	}
	readable := len(e.Blocks)
	if cut >= 0 {
		if readable = cut / int(n.block); readable == 0 {
			return nil, "bad_token"
		}
	}
	if lora == "" && !idKnown {
		return nil, "unreadable_space"
	}
	if lora == "" && id != "" {
		lora = LoRAByID(id)
	}
	_, saltField := fields["cache_salt"]
	if shownSalt == "" && !saltField && hasParent {
		shownSalt = n.salts[parent]
	}
	if shownSalt != "" && !saltField {
		for _, name := range e.Blocks {
			n.salts[name] = shownSalt
		}
	}
	if readable < len(e.Blocks) {
		n.count("bad_token")
		e.Blocks = e.Blocks[:readable]
	}
	if hasParent {
		e.HasParent, e.Parent = true, parent
	}
	e.Lookahead = uint32(len(ahead[0]))
	if eagle {
		e.Lookahead++
	}
	for i := range e.Blocks {
		end := (i + 1) * int(n.block)
		if eagle {
			end++
		}
		block := append([]uint32(nil), tokens[i*int(n.block):end]...)
		block = append(block, ahead[i]...)
		h, err := NewHasher(uint32(len(block)), Space{LoRA: lora, Salt: shownSalt})
		if err != nil {
			panic(err)
		}
		e.Locals = append(e.Locals, h.HashMedia(nil, block, media[i:])[0])
	}
	if session, _ := fields["session_id"].(string); session != "" {
		e.Session = HashSession(session)
	}
	if e.Attention.Main() && e.Tier == Device {
		n.right[uint64(e.Group)] = true
	}
	named()
	return []Event{e}, ""
}

// otherSize returns the reason to skip blocks of a main group with another size.
func (n *naiveDecoder) otherSize(e Event, size uint64, parent BlockHash, hasParent bool, tokens uint64) string {
	group := uint64(e.Group)
	if size > 0 && size < n.block && (n.right[group] || e.Tier != Device && len(n.right) > 0) {
		return "partial_block"
	}
	if e.Tier != Device {
		return "copy_size"
	}
	before := uint64(0)
	if hasParent {
		before = n.chains[[2]uint64{group, uint64(parent)}]
	}
	if size == 0 || size > n.block || before+tokens >= n.block {
		n.other[group] = true
	}
	if n.other[group] {
		return "block_size"
	}
	for i, name := range e.Blocks {
		n.chains[[2]uint64{group, uint64(name)}] = before + uint64(i+1)*size
	}
	return "partial_block"
}

func isText(v any) bool {
	_, is := v.(string)
	return is
}

func allNil(values []any) bool {
	for _, v := range values {
		if v != nil {
			return false
		}
	}
	return true
}

// naiveDynamo returns Dynamo's mm_hash of an identifier.
func naiveDynamo(s string) uint64 {
	if digestLike.MatchString(s) {
		v, _ := strconv.ParseUint(s[:16], 16, 64)
		return v
	}
	return MediaHash(s)
}

func naiveMedia(v any) (uint64, bool) {
	if bits, _, ok := randval.AsInteger(v); ok {
		return bits, true
	}
	switch v := v.(type) {
	case string:
		return MediaHash(v), true
	case []byte:
		return PayloadDigest(v), true // XXH3-64 of any text
	}
	return 0, false
}

func (n *naiveDecoder) name(v any) (BlockHash, bool) {
	if bits, _, ok := randval.AsInteger(v); ok {
		return BlockHash(bits), true
	}
	switch v := v.(type) {
	case []byte:
		if n.engine == SGLang {
			v = v[:min(8, len(v))]
		} else {
			v = v[max(0, len(v)-8):]
		}
		bits, err := strconv.ParseUint(fmt.Sprintf("%x", v), 16, 64)
		return BlockHash(bits), err == nil
	case string:
		if bits, err := strconv.ParseUint(v, 10, 64); err == nil {
			return BlockHash(bits), true
		}
		if bits, err := strconv.ParseInt(v, 10, 64); err == nil {
			return BlockHash(bits), true
		}
		v = strings.TrimPrefix(v, "0x")
		if !regexp.MustCompile(`^[0-9a-fA-F]+$`).MatchString(v) {
			return 0, false
		}
		if n.engine == SGLang {
			v = v[:min(16, len(v))]
		} else {
			v = v[max(0, len(v)-16):]
		}
		bits, err := strconv.ParseUint(v, 16, 64)
		return BlockHash(bits), err == nil
	}
	return 0, false
}

// The decoder and the naive decoder return equal events and skips for all messages.
func TestDecoderTwin(t *testing.T) {
	var all SkipCounts
	for seed := range max(uint64(testkit.Rounds(40)), 20) {
		c := chooser{rand.New(rand.NewPCG(9, seed)), 1 + int(seed%4)}
		engine := VLLM + Engine(seed%2)
		unsure := seed%10 == 9
		d, err := NewDecoder(DecoderConfig{Engine: engine, BlockSize: uint32(c.block), UnnamedAdapters: unsure})
		if err != nil {
			t.Fatal(err)
		}
		naive := &naiveDecoder{engine: engine, block: uint64(c.block), unsure: unsure, salts: map[BlockHash]string{},
			right: map[uint64]bool{}, other: map[uint64]bool{}, chains: map[[2]uint64]uint64{}}
		for i := range 200 {
			payload := pack(t, c.message())
			before, naiveBefore := d.Counts(), naive.counts
			got, err := d.Decode(payload)
			want, naiveErr := naive.decode(payload)
			if err != nil || naiveErr != nil {
				t.Fatalf("seed %d, message %d: %x: %v, naive: %v", seed, i, payload, err, naiveErr)
			}
			same := got.Timestamp == want.Timestamp && got.Rank == want.Rank && got.HasRank == want.HasRank &&
				len(got.Events) == len(want.Events)
			for j := range got.Events {
				same = same && sameEvent(got.Events[j], want.Events[j])
			}
			if !same {
				t.Fatalf("seed %d, message %d: %x\n%+v, want\n%+v", seed, i, payload, got, want)
			}
			if d.Counts() != naive.counts {
				for s, n := range d.Counts() {
					t.Logf("%s: %d, want %d", Skip(s), n-before[s], naive.counts[s]-naiveBefore[s])
				}
				t.Fatalf("seed %d, message %d: %x: counts differ", seed, i, payload)
			}
		}
		for s, n := range d.Counts() {
			all[s] += n
		}
	}
	for s, n := range all {
		if n == 0 && Skip(s) != skipTooLarge {
			t.Errorf("never tried: %s", Skip(s))
		}
	}
}
