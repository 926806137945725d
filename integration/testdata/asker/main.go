// Command asker is a program outside the module of kvatlas. It asks over NATS and over HTTP.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/nats-io/nats.go"
)

func main() {
	conn, err := nats.Connect(os.Args[1], nats.MaxReconnects(-1))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	overNATS, err := client.NATS(conn, "default", client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	overHTTP, err := client.HTTP([]string{"http://" + os.Args[2]}, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for _, c := range []*client.Client{overNATS, overHTTP} {
		ask(c)
		c.Close()
	}
}

func ask(c *client.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer, err := c.Find(ctx, &api.Query{Model: "m", Hashes: api.Hashes{1000, 1001, 1002}})
	if err != nil {
		log.Fatal(err)
	}
	for _, w := range answer.Workers {
		fmt.Printf("%s holds %d of %d blocks; complete: %v\n", w.Instance, w.Device, answer.Blocks, answer.Complete)
	}
	list, err := c.Workers(ctx)
	if err != nil {
		log.Fatal(err)
	}
	status, err := c.Status(ctx)
	if err != nil {
		log.Fatal(err)
	}
	again, err := c.StatusOf(ctx, status.Node)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d workers; node %s is ready: %v\n", len(list.Workers), again.Node, status.Ready)
	_, err = c.Find(ctx, &api.Query{Model: "none", Hashes: api.Hashes{1}})
	var failure *api.Error
	fmt.Println(client.CodeOf(err) == api.CodeUnknownModel, errors.As(err, &failure), failure.Code)
}
