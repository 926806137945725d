// Package conductor answers as Mooncake's conductor does over HTTP (kvcache-ai/Mooncake, mooncake-conductor, of which
// src/kvevent/event_manager.cpp is the measure): /register, /unregister, /query, /services and /global_view, in JSON
// and, as its newest version (kvcache-ai/Mooncake#3258), in MessagePack. It is another API than RFC #1403, which
// internal/faces/compat has. Publishers are vLLM's and, as since kvcache-ai/Mooncake#3744, SGLang's.
//
// A publisher of events that is registered is followed by a shim in this process ([compat.Shims]). A tenant other than
// default is a routing group: a model of its own in the index. What a hash profile says is not needed, since events
// have the tokens; it is checked, kept and told again.
//
// Requests are read as there: a field that is not known, or of another type, is refused with the reason and the field.
// http.go has the paths, requests.go how requests are read.
package conductor
