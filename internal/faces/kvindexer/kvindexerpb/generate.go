//go:build ignore

// Command generate makes the Go code of the .proto files in this folder: protoc is that of the environment grpc.txt of
// integration/python, protoc-gen-go that of the module's own protobuf. Run it with go generate.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

const grpcPlugin = "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1"

func main() {
	if err := generate(); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func generate() error {
	python, err := pyenv.FetchEnvironment(os.Stderr, "grpc.txt")
	if err != nil {
		return err
	}
	plugins, err := os.MkdirTemp("", "protoc")
	if err != nil {
		return err
	}
	defer os.RemoveAll(plugins)
	run := func(name string, args ...string) error {
		cmd := exec.Command(name, args...)
		cmd.Stdout, cmd.Stderr, cmd.Env = os.Stdout, os.Stderr, append(os.Environ(), "GOBIN="+plugins)
		return cmd.Run()
	}
	for _, plugin := range []string{"google.golang.org/protobuf/cmd/protoc-gen-go", grpcPlugin} {
		if err := run("go", "install", plugin); err != nil {
			return err
		}
	}
	files, err := filepath.Glob("*.proto")
	if err != nil {
		return err
	}
	args := []string{"-m", "grpc_tools.protoc", "-I.", "--plugin=" + filepath.Join(plugins, "protoc-gen-go"),
		"--plugin=" + filepath.Join(plugins, "protoc-gen-go-grpc"), "--go_out=.", "--go_opt=paths=source_relative",
		"--go-grpc_out=.", "--go-grpc_opt=paths=source_relative"}
	return run(python, append(args, files...)...)
}
