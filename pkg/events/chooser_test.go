package events

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/tools/randval"
)

// chooser generates valid messages of engines, and sometimes invalid ones.
type chooser struct {
	*rand.Rand
	block int
}

func (c chooser) oneIn(n int) bool { return c.IntN(n) == 0 }

func (c chooser) junk() any { return randval.Value(c.Rand, 3) }

func (c chooser) name() any {
	v := uint64(c.IntN(60))
	switch c.IntN(14) {
	case 0:
		return v * 0x0404040404040404
	case 1:
		return -int64(v)
	case 2:
		b := make([]byte, []int{32, 16, 8, 3, 1}[c.IntN(5)])
		b[0], b[len(b)-1] = byte(v), byte(v)
		return b
	case 3:
		return strconv.FormatUint(v*0x0202020202020202, []int{10, 16}[c.IntN(2)])
	case 4:
		return fmt.Sprintf("%064x", v)
	case 5:
		if c.oneIn(4) {
			return []any{"xyz", "", nil, 1.5, []byte{}, "0x1f", "-12", strings.Repeat("z", 20), []any{1}}[c.IntN(9)]
		}
	}
	return v
}

func (c chooser) list(n int, of func() any) []any {
	l := make([]any, n)
	for i := range l {
		l[i] = of()
	}
	return l
}

func (c chooser) keys(lora any) any {
	if c.oneIn(3) {
		return nil
	}
	var keys []any
	if lora != nil && !c.oneIn(5) {
		keys = append(keys, lora)
	}
	identifier := func() any {
		return []any{"image-1", strings.Repeat("5a", 32), strings.Repeat("A", 64), uint64(12345),
			[]byte("raw")}[c.IntN(5)]
	}
	for range c.IntN(3) {
		if c.oneIn(4) {
			keys = append(keys, "bare-"+strconv.Itoa(c.IntN(3)))
		} else {
			keys = append(keys, []any{identifier(), c.IntN(10) - 5})
		}
	}
	if c.oneIn(3) {
		keys = append(keys, []any{"tenant-a", "tenant-b", dynamoSalt + "tenant-a", strings.Repeat("0b", 32)}[c.IntN(4)])
	}
	if c.oneIn(6) {
		keys = append(keys, make([]byte, []int{32, 5}[c.IntN(2)]))
	}
	if c.oneIn(25) {
		keys = append(keys, c.junk())
	}
	if keys == nil {
		keys = []any{}
	}
	return keys
}

func (c chooser) event() any {
	if c.oneIn(40) {
		return c.junk()
	}
	fields := pairs{}
	set := func(name string, v any) {
		if c.oneIn(60) {
			v = c.junk()
		}
		fields = append(fields, pair{name, v})
	}
	n := c.IntN(4)
	if c.oneIn(5) {
		n = c.IntN(20)
	}
	medium := []any{"GPU", "GPU", "GPU", nil, "CPU", "cpu", "CPU_PINNED", "STORAGE", "NVME", "moon"}[c.IntN(10)]
	kind := []string{"BlockStored", "BlockStored", "BlockStored", "BlockStored", "BlockRemoved", "BlockRemoved",
		"AllBlocksCleared", "TierBlocksCleared", "BlockInactive"}[c.IntN(9)]
	set("type", kind)
	saltShown := false
	switch kind {
	case "BlockStored":
		hashes := c.list(n, c.name)
		set("block_hashes", hashes)
		if c.oneIn(3) {
			set("parent_block_hash", nil)
		} else {
			set("parent_block_hash", c.name())
		}
		size, count := c.block, c.block*n
		if c.oneIn(12) {
			size = c.IntN(6)
		}
		if c.oneIn(12) {
			count = max(0, count+c.IntN(5)-2)
		}
		if c.oneIn(12) {
			count = 0
		}
		tokens := c.list(count, func() any { return uint32(randval.Int(c.Rand)) })
		if c.oneIn(6) {
			last := uint32(7)
			for i := range tokens {
				next := uint32(randval.Int(c.Rand))
				tokens[i] = []any{last, next}
				if last = next; c.oneIn(100) {
					last++
				}
			}
		}
		if count > 0 && c.oneIn(30) {
			tokens[c.IntN(count)] = c.junk()
		}
		set("token_ids", tokens)
		set("block_size", size)
		var id, lora any
		if c.oneIn(4) {
			id, lora = c.IntN(3), []any{"adapter-a", "adapter-b", nil, ""}[c.IntN(4)]
		}
		if c.oneIn(30) {
			id = "uuid-7"
		}
		set("lora_id", id)
		set("medium", medium)
		if saltShown = c.oneIn(8); saltShown {
			set("lora_name", map[string]any{"cache_salt": []any{"tenant-a", nil}[c.IntN(2)], "session_id": "s"})
		} else {
			set("lora_name", lora)
		}
		blocks := n
		if c.oneIn(20) {
			blocks = c.IntN(4)
		}
		if keys := c.list(blocks, func() any { return c.keys(lora) }); c.oneIn(3) {
			set("extra_keys", nil)
		} else {
			set("extra_keys", keys)
		}
		set("group_idx", c.IntN(2))
		set("kv_cache_spec_kind", []any{"full_attention", "full_attention", nil, "mamba", "sliding_window",
			"something new"}[c.IntN(6)])
		set("kv_cache_spec_sliding_window", nil)
	case "BlockRemoved":
		set("block_hashes", c.list(n, c.name))
		set("medium", medium)
		set("group_idx", c.IntN(2))
	case "TierBlocksCleared":
		set("medium", medium)
	}
	if c.oneIn(2) { // an array of any version
		length := len(fields)
		if c.oneIn(3) {
			length = c.IntN(length + 1)
		}
		var event []any
		for _, f := range fields[:length] {
			event = append(event, f.value)
		}
		if length == len(fields) && c.oneIn(5) {
			event = append(event, c.junk(), c.junk())
		}
		return event
	}
	if c.oneIn(10) {
		set("locality", []any{"LOCAL", "local", "REMOTE", nil}[c.IntN(4)])
	}
	if !saltShown && c.oneIn(6) {
		set("cache_salt", []any{"tenant-a", "tenant-b", "", nil}[c.IntN(4)])
	}
	if c.oneIn(6) {
		shape, mixed := c.IntN(5), c.oneIn(6)
		set("lookahead_token_ids", c.list(n, func() any {
			if mixed {
				shape = c.IntN(5)
			}
			return []any{nil, []any{}, []any{uint32(randval.Int(c.Rand))}, []any{1, 2}, uint32(randval.Int(c.Rand))}[shape]
		}))
	}
	if !saltShown && c.oneIn(4) {
		set("session_id", []any{"chat-17", "", strings.Repeat("s", 256+c.IntN(2)), c.junk()}[c.IntN(4)])
	}
	if c.oneIn(10) {
		set("origin", []any{"NEW", "REUSED", nil, 7}[c.IntN(4)])
	}
	c.Shuffle(len(fields), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
	if c.oneIn(3) { // nil values may be absent
		var said pairs
		for _, f := range fields {
			if f.value != nil {
				said = append(said, f)
			}
		}
		fields = said
	}
	return fields
}

func (c chooser) message() any {
	events := c.list(c.IntN(6), c.event)
	ts := []any{1795254706.123, uint32(17), int8(-1), nil, "x"}[max(0, c.IntN(40)-35)]
	rank := []any{0, 3, nil, -1, "x"}[max(0, c.IntN(40)-35)]
	if c.oneIn(6) {
		fields := pairs{{"events", events}, {"ts", ts}, {[]string{"data_parallel_rank", "attn_dp_rank"}[c.IntN(2)],
			rank}, {"new", c.junk()}}
		c.Shuffle(len(fields), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
		return fields
	}
	return []any{ts, events, rank, c.junk()}[:2+c.IntN(3)]
}

// naiveTokens reads tokens, or pairs in which the first token repeats the end of the previous pair.
func naiveTokens(list []any) (tokens []uint32, eagle, ok bool) {
	token := func(v any) (uint32, bool) {
		bits, negative, ok := randval.AsInteger(v)
		return uint32(bits), ok && !negative && bits <= math.MaxUint32
	}
	if len(list) > 0 {
		_, eagle = list[0].([]any)
	}
	for i, v := range list {
		if eagle {
			two, _ := v.([]any)
			if len(two) != 2 {
				return nil, true, false
			}
			t, ok1 := token(two[0])
			u, ok2 := token(two[1])
			if !ok1 || !ok2 || i > 0 && tokens[i] != t {
				return nil, true, false
			}
			if i == 0 {
				tokens = append(tokens, t)
			}
			tokens = append(tokens, u)
			continue
		}
		t, ok := token(v)
		if !ok {
			return nil, false, false
		}
		tokens = append(tokens, t)
	}
	return tokens, eagle, true
}
