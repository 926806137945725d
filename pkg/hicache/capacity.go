package hicache

// The releases of SGLang in which the limit of what is loaded ahead changed
// (HiCacheController.attach_storage_backend of python/sglang/srt/managers/cache_controller.py in the published wheels).
var (
	halfPoolSince   = version{0, 5, 15}
	bufferModeSince = version{0, 5, 19}
)

// PrefetchLimit is how many tokens SGLang loads ahead at most, of the room of its host and device pools in tokens: half
// of the host pool; with bufferOnly 0.9 of it, from 0.5.19 on; before 0.5.15, 0.8 of what the host pool has more than
// the device pool. release is the engine's; "" is a new one. 0 means that the host pool is not known. A limit of less
// than one token is 1, which is less than a page.
func PrefetchLimit(release string, host, device uint64, bufferOnly bool) int {
	if host == 0 {
		return 0
	}
	before := func(v version) bool { return release != "" && !since(release, v) }
	switch {
	case before(halfPoolSince):
		return max(1, int(0.8*(float64(host)-float64(device))))
	case bufferOnly && !before(bufferModeSince):
		return int(0.9 * float64(host))
	}
	return max(1, int(0.5*float64(host)))
}
