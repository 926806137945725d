package corpus

// Named is a corpus with a common name. The options do not include the trace.
type Named struct {
	Name    string
	Options Options
	About   string
}

// TheNamed returns the corpora for comparisons of indexes. The first three are easy: they never remove a block with a
// held successor, and never store a held block again.
func TheNamed() []Named {
	with := func(change func(o *Options)) Options {
		o := Defaults()
		change(&o)
		return o
	}
	return []Named{
		{"conv64", Defaults(), "64 workers with room for 60,000 blocks"},
		{"conv256", with(func(o *Options) { o.Workers, o.Capacity = 256, 20000 }), "256 workers with room for 20,000"},
		{"every256", with(func(o *Options) { o.Workers, o.Everyone, o.Requests, o.Capacity = 256, true, 40, 1000000 }),
			"256 workers with equal blocks"},
		{"holes64", with(func(o *Options) { o.Evict = Random }),
			"blocks leave from anywhere, second copies are common"},
		{"onlyholes64", with(func(o *Options) { o.Evict = Holes }), "blocks leave from anywhere, without second copies"},
		{"private64", with(func(o *Options) { o.Names = Private }), "every worker has different names"},
		{"spread64", with(func(o *Options) { o.Names, o.Sticky = Private, 0 }),
			"every worker has different names, and random routing gives many workers the same blocks"},
	}
}

// right has the digests of a naive twin for the named corpora, from Mooncake's conversation trace and from the
// generator's seed 0 with the default clump. The counts of the header identify a corpus. private64 has the counts and
// the answers of conv64.
var right = map[Header]Digest{
	// conv64, private64
	{64, 16, 281409, 6477149, 2637149, 12031, 9044013, 263984, 5394, 3840000, 3532936}:  0x4100b23a895c2f72,
	{256, 16, 279084, 6494264, 1557450, 12031, 9044013, 263984, 3069, 4936814, 4544657}: 0x21883218545996d2, // conv256
	{256, 16, 245544, 8011776, 0, 40, 31625, 245504, 0, 8011776, 31296}:                 0xcc0d2a8c22ed2b8e, // every256
	{64, 16, 281434, 7545850, 3705850, 12031, 9044013, 264008, 5395, 3416099, 3208589}:  0x277043a950fe394a, // holes64
	{64, 16, 283316, 8783305, 4943305, 12031, 9044013, 264048, 7237, 3840000, 2737855}:  0xacb475ccd827ed5f, // spread64

	{64, 16, 378027, 6584729, 2744729, 12031, 9044013, 360601, 5395, 3840000, 3608759}: 0xb26fcaa461d20e0e, // onlyholes64

	// generated conv64, private64
	{64, 16, 279597, 6153796, 2321449, 12031, 9058725, 263034, 4532, 3832347, 3471231}: 0x7c145c9c07c03ab4,
	// generated conv256
	{256, 16, 277734, 6165103, 1403299, 12031, 9058725, 263034, 2669, 4761804, 4317371}: 0xd7ff269969531def,
	// generated every256
	{256, 16, 238120, 8782848, 0, 40, 34666, 238080, 0, 8782848, 34308}: 0xcc0d2a8c22ed2b8e,
	// generated holes64
	{64, 16, 279597, 7311047, 3478700, 12031, 9058725, 263034, 4532, 3390781, 3161530}: 0x03e6ed342ebe6508,
	// generated onlyholes64
	{64, 16, 377825, 6264534, 2432187, 12031, 9058725, 361262, 4532, 3832347, 3563435}: 0x8e7a883914ca48d7,
	// generated spread64
	{64, 16, 281612, 8824259, 4984259, 12031, 9058725, 263036, 6545, 3840000, 2570213}: 0x92ef3fd432cfd8ae,
}

// Expected returns the correct digest for a corpus with header h, if the corpus is one of [TheNamed] from Mooncake's
// conversation trace or from seed 0. A correct answer counts every leading block with more stored than removed copies.
func Expected(h Header) (d Digest, known bool) {
	d, known = right[h]
	return d, known
}
