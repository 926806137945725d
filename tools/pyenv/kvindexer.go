package pyenv

import "testing"

// KVIndexerClient is a running integration/python/kv_indexer_client.py, which sends queries as SGLang's router does.
// The methods fail the test on errors. They are not safe for concurrent use.
type KVIndexerClient struct{ driver }

// StartKVIndexerClient starts a client, made from the .proto file, that runs until the end of the test. wheel is
// SGLang's wheel.
func StartKVIndexerClient(t testing.TB, wheel, proto, address string) *KVIndexerClient {
	t.Helper()
	return &KVIndexerClient{startDriver(t, PythonWith(t, "grpc.txt"), "kv_indexer_client.py",
		map[string]string{"wheel": wheel, "proto": proto, "address": address})}
}
