package hicache

import "fmt"

// ObjectLayout lists the objects of a page in a Mooncake store, by pool: hicache_object_layout of SGLang from 0.5.23 on
// (MooncakeStore.describe_l3_object_layout). It is the object, or the whole reply of GET /get_hicache_l3_cache_layout
// with the object in Inner. Null and absent fields are zero.
type ObjectLayout struct {
	Pools     []Pool  `json:"pools,omitempty"`
	KeyPrefix *string `json:"key_prefix,omitempty"` // as [SGLang.KeyPrefix]
	PPRank    *int    `json:"pp_rank,omitempty"`    // pipeline rank of the pools; null: all ranks
	PPSize    int     `json:"pp_size,omitempty"`

	Enabled  *bool         `json:"enabled,omitempty"`   // false: the engine cannot list the objects; see Reason
	Backend  string        `json:"backend,omitempty"`   // "mooncake", or ""
	PageSize int           `json:"page_size,omitempty"` // tokens; 0: unset
	Reason   string        `json:"reason,omitempty"`
	Inner    *ObjectLayout `json:"hicache_object_layout,omitempty"`
}

// Pool describes the objects of a page with a kind of state.
type Pool struct {
	Pool     string    `json:"pool"`                 // such as kv, indexer, swa, mamba; repeated for each pipeline rank
	Suffixes []string  `json:"suffixes"`             // suffixes of the objects' keys after the page's hash, for all ranks
	Policy   HitPolicy `json:"hit_policy,omitempty"` // "" is all_pages

	// TrailingPages is the number of a prefix's last pages that must be present, for the policy trailing_pages. A
	// shorter prefix needs all pages.
	TrailingPages int `json:"trailing_pages,omitempty"`
}

// HitPolicy selects the pages of a pool that an engine needs to load a prefix.
type HitPolicy string

// Policies that determine the length of a prefix. SGLang's third policy, block_groups, does not, and its pools are
// ignored.
const (
	AllPages      HitPolicy = "all_pages"
	TrailingPages HitPolicy = "trailing_pages"
	blockGroups   HitPolicy = "block_groups"
)

// Limits of a layout.
const (
	maxPools    = 64
	maxTrailing = 1 << 16 // pages
	maxSuffix   = 256     // bytes
)

// layout returns the layout of a page's objects, or nil if the workers do not list the objects.
func (s *SGLang) layout() *ObjectLayout {
	l := s.ObjectLayout.inner()
	if l == nil || !s.ObjectLayout.enabled() || !l.enabled() || len(l.Pools) == 0 {
		return nil
	}
	return l
}

// Listed reports whether ObjectLayout lists the objects of a page.
func (s *SGLang) Listed() bool { return s.layout() != nil }

// inner returns the object with the pools.
func (l *ObjectLayout) inner() *ObjectLayout {
	if l != nil && l.Inner != nil {
		return l.Inner
	}
	return l
}

func (l *ObjectLayout) enabled() bool { return l.Enabled == nil || *l.Enabled }

// objects returns the objects of a page: the suffixes of the objects that each page of a prefix needs, and the pools of
// which only the last pages matter. free means that no pool needs each page, so a single missing page does not end a
// run.
func (s *SGLang) objects() (suffixes []string, trailing []Pool, free bool) {
	l := s.layout()
	if l == nil {
		return s.suffixes(), nil, false
	}
	for _, p := range l.Pools {
		switch p.Policy {
		case TrailingPages:
			trailing = append(trailing, p)
		case AllPages, "":
			suffixes = append(suffixes, p.Suffixes...)
		}
	}
	return suffixes, trailing, len(suffixes) == 0
}

// check adds the faults of a layout.
func (l *ObjectLayout) check(wrong *complaints, s *SGLang) {
	const name = "hicache_object_layout"
	wrong.add(s.Backend != mooncakeBackend, "%s describes objects of backend %s, not of %q", name, mooncakeBackend,
		s.Backend)
	if l.Inner != nil {
		wrong.add(l.Inner.Inner != nil, "%s has another %s within its own", name, name)
		wrong.add(len(l.Pools) > 0, "%s has pools beside the %s within it", name, name)
	}
	for _, part := range []*ObjectLayout{l, l.Inner} {
		if part == nil || !part.enabled() {
			continue
		}
		wrong.add(part.Backend != "" && part.Backend != mooncakeBackend, "%s is of backend %q, not of %s", name,
			part.Backend, mooncakeBackend)
		wrong.add(part.PageSize != 0 && part.PageSize != s.PageSize, "%s has pages of %d tokens, page_size is %d", name,
			part.PageSize, s.PageSize)
	}
	if l = s.layout(); l == nil {
		return
	}
	wrong.add(l.PPRank != nil && l.PPSize > 1,
		"%s lists the objects of pipeline rank %d alone, of %d: it needs those of all, with pp_rank null", name,
		value(l.PPRank), l.PPSize)
	wrong.add(s.KeyPrefix != nil && l.KeyPrefix != nil && *s.KeyPrefix != *l.KeyPrefix,
		"key_prefix %.60q, but that of %s is %.60q", value(s.KeyPrefix), name, value(l.KeyPrefix))
	wrong.unless(name+": pools", len(l.Pools), 1, maxPools)
	keys, deciding := 0, 0
	for i := range l.Pools {
		p := &l.Pools[i]
		p.check(wrong, fmt.Sprintf("%s: pool %.40q", name, p.Pool))
		if keys += len(p.Suffixes); p.Policy != blockGroups {
			deciding++
		}
	}
	wrong.add(deciding == 0, "%s: no pool decides how long a prefix is", name)
	wrong.add(keys > maxRanks, "%s: %d objects of one page: at most %d", name, keys, maxRanks)
}

func (p *Pool) check(wrong *complaints, name string) {
	wrong.add(p.Pool == "", "%s has no name", name)
	wrong.add(len(p.Suffixes) == 0, "%s has no suffixes", name)
	for _, end := range p.Suffixes {
		wrong.add(end == "" || len(end) > maxSuffix, "%s: suffix %.40q has %d bytes: want 1 to %d", name, end, len(end),
			maxSuffix)
	}
	switch p.Policy {
	case TrailingPages:
		wrong.unless(name+": trailing_pages", p.TrailingPages, 1, maxTrailing)
	case AllPages, blockGroups, "":
	default:
		wrong.add(true, "%s: hit_policy %.40q: want %s, %s or %s", name, string(p.Policy), AllPages, TrailingPages,
			blockGroups)
	}
}

// value returns the value at p, or the zero value for nil.
func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
