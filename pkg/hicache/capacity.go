package hicache

// Releases of SGLang that changed the limit of prefetched tokens (HiCacheController.attach_storage_backend of
// python/sglang/srt/managers/cache_controller.py in the published wheels).
var (
	halfPoolSince   = version{0, 5, 15}
	bufferModeSince = version{0, 5, 19}
)

// PrefetchLimit returns the maximum number of tokens that the engine prefetches. host and device are the sizes of the
// pools in tokens. The limit is half of the host pool. With bufferOnly, from release 0.5.19 on, it is 0.9 of the host
// pool. Before 0.5.15, it is 0.8 of the difference between host pool and device pool. No EngineVersion means a new
// release. 0 means that the host pool is unknown. A limit below one token becomes 1, which is less than a page.
func (s *SGLang) PrefetchLimit(host, device uint64, bufferOnly bool) int {
	if host == 0 {
		return 0
	}
	before := func(v version) bool { return s.EngineVersion != "" && !since(s.EngineVersion, v) }
	switch {
	case before(halfPoolSince):
		return max(1, int(0.8*(float64(host)-float64(device))))
	case bufferOnly && !before(bufferModeSince):
		return int(0.9 * float64(host))
	}
	return max(1, int(0.5*float64(host)))
}
