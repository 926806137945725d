// Package natskit starts NATS servers in the process of a test.
package natskit
