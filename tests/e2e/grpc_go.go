// Calls Export of MetricsService with grpc-go, with each compression that is named, as a Collector's exporter does.
// The codecs are registered as the Collector registers them (config/configgrpc): snappy's framed format and zstd.
//
// Usage: grpc-go HOST:PORT BODY_FILE ENCODING... ; prints one line for each.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/golang/snappy"
	"github.com/klauspost/compress/zstd"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
)

const export = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"

// asItIs sends a message that is encoded already.
type asItIs struct{}

func (asItIs) Marshal(v interface{}) ([]byte, error) { return *(v.(*[]byte)), nil }
func (asItIs) Unmarshal(data []byte, v interface{}) error {
	*(v.(*[]byte)) = append([]byte{}, data...)
	return nil
}
func (asItIs) Name() string { return "proto" }

type snappyCodec struct{}

func (snappyCodec) Compress(w io.Writer) (io.WriteCloser, error) {
	return snappy.NewBufferedWriter(w), nil
}
func (snappyCodec) Decompress(r io.Reader) (io.Reader, error) { return snappy.NewReader(r), nil }
func (snappyCodec) Name() string                              { return "snappy" }

type zstdCodec struct{}

func (zstdCodec) Compress(w io.Writer) (io.WriteCloser, error) {
	return zstd.NewWriter(w, zstd.WithWindowSize(512<<10))
}
func (zstdCodec) Decompress(r io.Reader) (io.Reader, error) { return zstd.NewReader(r) }
func (zstdCodec) Name() string                              { return "zstd" }

func main() {
	encoding.RegisterCompressor(snappyCodec{})
	encoding.RegisterCompressor(zstdCodec{})
	body, err := os.ReadFile(os.Args[2])
	if err != nil {
		panic(err)
	}
	codec := grpc.WithDefaultCallOptions(grpc.ForceCodec(asItIs{}))
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), codec)
	if err != nil {
		panic(err)
	}
	for _, name := range os.Args[3:] {
		var trailer metadata.MD
		options := []grpc.CallOption{grpc.Trailer(&trailer)}
		if name != "none" {
			options = append(options, grpc.UseCompressor(name))
		}
		taken := 0
		for i := 0; i < 50; i++ { // each with another timeout on the wire
			ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
			var answer []byte
			if err := connection.Invoke(ctx, export, &body, &answer, options...); err != nil {
				fmt.Fprintln(os.Stderr, name, err)
			} else {
				taken++
			}
			stop()
		}
		fmt.Println(name, taken, trailer["ingero-threshold"])
	}
}
