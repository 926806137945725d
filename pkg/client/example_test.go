package client_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// indexer simulates a running indexer.
func indexer(w http.ResponseWriter, _ *http.Request) {
	body, err := api.Marshal(api.MsgPack, &api.Answer{
		Model: "llama", BlockSize: 16, Blocks: 767, Complete: true,
		Workers: []api.Overlap{{Instance: "worker-1", Device: 12, Host: 3}},
	})
	if err != nil {
		log.Fatal(err)
	}
	w.Header().Set("Content-Type", api.MsgPack)
	_, _ = w.Write(body)
}

// With NATS, the program calls client.NATS(conn, "default", client.Options{}) in place of client.HTTP.
func Example() {
	server := httptest.NewServer(http.HandlerFunc(indexer))
	defer server.Close()
	c, err := client.HTTP([]string{server.URL}, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer, err := c.Find(ctx, &api.Query{Model: "llama", Tokens: api.Tokens{1, 2, 3}})
	switch client.CodeOf(err) {
	case "":
	case api.CodeUnknownModel:
		log.Fatal("no worker serves the model")
	default:
		log.Fatal(err)
	}
	for _, w := range answer.Workers {
		fmt.Printf("%s has %d of %d blocks in device memory, and %d more in host memory\n",
			w.Instance, w.Device, answer.Blocks, w.Host)
	}
	// Output: worker-1 has 12 of 767 blocks in device memory, and 3 more in host memory
}

// chooser simulates an indexer that chooses worker-1 for every request.
func chooser(w http.ResponseWriter, r *http.Request) {
	var reply any = &api.Done{Done: true}
	if r.URL.Path == "/v1/select" {
		reply = &api.Selection{Model: "llama", RequestID: "req-1", Booked: true, Worker: "worker-1",
			Endpoint: "http://10.0.0.1:8000"}
	}
	body, err := api.Marshal(api.MsgPack, reply)
	if err != nil {
		log.Fatal(err)
	}
	w.Header().Set("Content-Type", api.MsgPack)
	_, _ = w.Write(body)
}

// A router books each request on a worker, and reports the first token and the end.
func ExampleClient_Select() {
	server := httptest.NewServer(http.HandlerFunc(chooser))
	defer server.Close()
	c, err := client.HTTP([]string{server.URL}, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	ctx := context.Background()

	const id = "req-1"                                     // a new id for each try
	short, cancel := context.WithTimeout(ctx, time.Minute) // in a router, for example 250 ms
	chosen, err := c.Select(short, &api.SelectRequest{
		Query: api.Query{Model: "llama", Tokens: api.Tokens{1, 2, 3}}, RequestID: id, Book: true,
	})
	cancel()
	if err != nil {
		log.Fatal(err) // a router chooses a worker without kvatlas
	}
	fmt.Println("send the request to", chosen.Worker, chosen.Endpoint)
	err = c.PrefillComplete(ctx, "llama", id) // at the first token
	if err != nil {
		log.Print(err)
	}
	err = c.FreeResult(ctx, "llama", id, api.ResultOK) // at the end
	if err != nil {
		log.Print(err)
	}
	// Output: send the request to worker-1 http://10.0.0.1:8000
}
