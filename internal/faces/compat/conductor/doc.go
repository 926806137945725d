// Package conductor serves the HTTP API of Mooncake's conductor: /register, /unregister, /query, /services and
// /global_view. The model is src/kvevent/event_manager.cpp in mooncake-conductor (kvcache-ai/Mooncake). Bodies are JSON
// or, as in the newest version (kvcache-ai/Mooncake#3258), MessagePack. Package internal/faces/compat serves RFC #1403,
// which is a different API. Publishers are engines of the types vLLM and, since kvcache-ai/Mooncake#3744, SGLang.
//
// A shim in this process follows every registered publisher ([compat.Shims]). A tenant other than default is a routing
// group, and the index has a separate model for every group. The index does not need hash profiles, because events
// contain tokens. The package checks, stores and lists the profiles.
//
// As in the conductor, an unknown field or a value of the wrong type is refused with the reason and the field. http.go
// serves the paths. requests.go reads the requests.
package conductor
