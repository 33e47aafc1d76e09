import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;
import java.util.Arrays;
import java.util.List;

/** Runs a MongoDB server in memory on a port of 127.0.0.1 until standard input ends. */
public class MongoLauncher {
    private static final class Version implements MongoVersion {
        @Override public String toVersionString() { return "5.0.0"; }
        @Override public List<Integer> getVersionArray() { return Arrays.asList(new Integer[] {5, 0, 0, 0}); }
        @Override public int getWireVersion() { return 13; }
    }

    public static void main(String[] args) throws Exception {
        MongoServer server = new MongoServer(new MemoryBackend().version(new Version()));
        server.bind("127.0.0.1", Integer.parseInt(args[0]));
        while (System.in.read() >= 0) { }
        server.shutdownNow();
    }
}
