package pyenv

import "testing"

// KVIndexerClient is a running integration/python/kv_indexer_client.py, which asks as SGLang's router does. Its methods
// fail the test if it does not do as told. They are for one goroutine.
type KVIndexerClient struct{ driver }

// StartKVIndexerClient starts a client, made from the .proto file, that lives until the test ends. wheel is SGLang's.
func StartKVIndexerClient(t testing.TB, wheel, proto, address string) *KVIndexerClient {
	t.Helper()
	return &KVIndexerClient{startDriver(t, PythonWith(t, "grpc.txt"), "kv_indexer_client.py",
		map[string]string{"wheel": wheel, "proto": proto, "address": address})}
}
