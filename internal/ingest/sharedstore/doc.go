// Package sharedstore queries the objects of shared stores of KV cache. The stores are a Mooncake master
// ([Mooncake], over HTTP) and a folder ([Folder]).
//
//	master, err := sharedstore.NewMooncake(sharedstore.MooncakeConfig{Address: "mooncake:9003"})
//	mirror := sharedstore.NewMirror(master, sharedstore.MirrorConfig{})
//	present, known, err := mirror.Exists(ctx, keys)
//
// A [Mirror] is a store that answers from the events of a Mooncake master, and queries the master only for the rest.
// The events arrive as [Message] from the shim of the store. All stores implement [hicache.Store] and are safe for
// concurrent use. Package hicache computes the keys and judges the result.
package sharedstore
